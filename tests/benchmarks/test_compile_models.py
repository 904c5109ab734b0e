"""The architectures of benchmarks.compile_models, uncompiled, on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stof_models.info import ExportInfo, InputInfo, SiteInfo  # noqa: E402
from stof_models.masks import MaskSpec  # noqa: E402

from benchmarks import compile_models  # noqa: E402

SEQ = 128


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(compile_models, "DEVICE", "cpu")
    monkeypatch.setattr(compile_models, "DTYPE", torch.float32)


def info(family: str, kind: str) -> ExportInfo:
    pixels = family == "vit"
    mask = None if kind == "none" else MaskSpec(kind, SEQ, SEQ, block=64, random_blocks=0)
    seq = 65 if pixels else SEQ
    site = SiteInfo("site", 4, 2 if family == "llama" else 4, 16, seq, seq, mask, False, "none", 0.0)
    given = InputInfo("x", "int64", (2, SEQ), "tokens", 50)
    if pixels:
        given = InputInfo("x", "float32", (2, 3, 16, 16), "normal", 0)
    options = {"hidden": 64, "vocab": 50}
    return ExportInfo(family, options, (given,), ("y",), {}, {}, (site, site))


@pytest.mark.parametrize("family, kind", [("gpt2", "causal"), ("llama", "causal"), ("bert", "window")])
def test_what_a_token_sees(family, kind):
    """Changing the last token changes the last place, and no place that can not see it."""
    about = info(family, kind)
    if kind == "window":
        site = about.sites[0].__class__(**{**about.sites[0].__dict__, "mask": MaskSpec("window", SEQ, SEQ, width=8)})
        about = ExportInfo(**{**about.__dict__, "sites": (site, site)})
    model, tokens = compile_models.built(about)
    with torch.no_grad():
        before = model(tokens)
        tokens[:, -1] = (tokens[:, -1] + 1) % 50
        after = model(tokens)
    assert before.shape == (2, SEQ, 64) and torch.isfinite(before).all()
    assert not torch.allclose(before[:, -1], after[:, -1])
    blind = slice(0, SEQ - 1) if kind == "causal" else slice(0, SEQ - 1 - 2 * 8)
    torch.testing.assert_close(before[:, blind], after[:, blind])


def test_relative_bias_and_pixels():
    for family, seq in (("t5-encoder", SEQ), ("vit", 65)):
        model, inputs = compile_models.built(info(family, "none"))
        with torch.no_grad():
            found = model(inputs)
        assert found.shape == (2, seq, 64) and torch.isfinite(found).all()


def test_rope_turns_by_the_distance_alone():
    cos_sin = compile_models.attending(compile_models.STYLES["llama"], info("llama", "causal").sites[0]).angles
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, SEQ, 16)
    scores = compile_models.rotated(q, *cos_sin) @ compile_models.rotated(k, *cos_sin).transpose(-1, -2)
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("mask", [MaskSpec("window", SEQ, SEQ, width=8), MaskSpec("causal", SEQ, SEQ)])
def test_masks_with_a_rule_are_the_models(mask):
    site = SiteInfo("site", 4, 4, 16, SEQ, SEQ, mask, False, "none", 0.0)
    rule = compile_models.attending(compile_models.STYLES["bert"], site).mask.mask_mod
    places = torch.arange(SEQ)
    assert (rule(0, 0, places[:, None], places[None, :]).numpy() == mask.rows(0, SEQ)).all()
