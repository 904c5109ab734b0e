"""The main job on a model that a real exporter wrote, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from stof_onnx import cli

torch = pytest.importorskip("torch")

SHAPES = ["--shape", "input_ids:1x2:2x96:3x128"]
SITE_KEYS = {
    "name", "mask", "bias", "density", "tiles", "heads", "kv_heads", "head_dim", "seq_q", "seq_kv", "max_abs_err",
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA with grouped K/V heads, a window of its own, a padding input and dynamic axes."""
    from stof_models.export import export_model
    from stof_models.options import ExportOptions

    path = tmp_path_factory.mktemp("export") / "llama.onnx"
    options = ExportOptions("llama", mask="causal-window", padding=True, dynamic="sequence", kv_heads=2, layers=2)
    export_model(options, path)
    return path


def test_optimize(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, report_path = tmp_path / "out.onnx", tmp_path / "report.json"
    before = exported.read_bytes()
    assert cli.main(["optimize", str(exported), "-o", str(output), *SHAPES, "--report", str(report_path)]) == 0
    assert exported.read_bytes() == before
    report = json.loads(report_path.read_text())
    attention = report["attention"]
    assert (attention["found"], attention["replaced"], attention["refused"]) == (2, 2, [])
    for site in attention["sites"]:
        assert set(site) >= SITE_KEYS and set(site["tiles"]) == {"full", "part", "empty"}
        assert (site["heads"], site["kv_heads"], site["head_dim"]) == (4, 2, 16)
        assert (site["seq_q"], site["seq_kv"]) == (128, 128) and site["mask"] == "static+runtime-padding"
        assert 0 < site["density"] < 0.5 and site["max_abs_err"] < 1e-4
    assert report["verify"]["passed"] and len(report["verify"]["samples"]) == 5
    assert set(report["timings"]) >= {"load", "match", "rewrite", "save", "verify"}
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("2 of 2 attentions replaced") and printed[1] == f"written: {output}"


def test_the_file_is_portable_and_says_so_at_every_size(exported: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    assert cli.main(["optimize", str(exported), "-o", str(output), *SHAPES, "--no-verify"]) == 0
    onnx.checker.check_model(str(output), full_check=True)
    a, b = (ort.InferenceSession(str(p)) for p in (exported, output))
    rng = np.random.default_rng(11)
    for batch, length in ((1, 2), (3, 128), (2, 77)):
        ids = rng.integers(0, 128, (batch, length))
        mask = np.ones_like(ids)
        mask[0, length // 2 :] = 0
        feeds = {"input_ids": ids, "attention_mask": mask}
        np.testing.assert_allclose(b.run(None, feeds)[0], a.run(None, feeds)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match=r"Non-zero status code"):  # longer than the encoded mask
        b.run(None, {"input_ids": rng.integers(0, 128, (1, 200)), "attention_mask": np.ones((1, 200), np.int64)})


def test_again_changes_nothing(exported: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert cli.main(["optimize", str(exported), "-o", str(tmp_path / name), *SHAPES, "--no-verify"]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert cli.main(["optimize", str(tmp_path / "a"), "-o", str(tmp_path / "c"), *SHAPES]) == 0
    assert (tmp_path / "c").read_bytes() == (tmp_path / "a").read_bytes()


def test_inspect(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    arguments = ["inspect", str(exported), *SHAPES, "--pictures", str(tmp_path / "p"), "--report", str(report)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 attentions can be replaced" in printed and "█" in printed
    assert (tmp_path / "p" / "mask_0.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(report.read_text())["attention"]["found"] == 2
    assert sorted(f.name for f in tmp_path.iterdir()) == ["p", "r.json"]


def test_a_result_that_fails_is_not_written(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewrite is made to lose the mask of one site."""
    from dataclasses import replace

    from stof_onnx import pipeline

    sound = pipeline.replace_attention

    def careless(model: object, matches: list[object]) -> object:
        return sound(model, [replace(matches[0], mask=None), *matches[1:]])  # type: ignore[arg-type, type-var]

    monkeypatch.setattr(pipeline, "replace_attention", careless)
    (tmp_path / "out.onnx").write_bytes(b"older")
    report = tmp_path / "r.json"
    arguments = ["optimize", str(exported), "-o", str(tmp_path / "out.onnx"), *SHAPES, "--report", str(report)]
    assert cli.main(arguments) == 1
    assert (tmp_path / "out.onnx").read_bytes() == b"older"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out.onnx", "r.json"]
    printed = capsys.readouterr().out
    assert "nothing was written" in printed and "FAILED" in printed
    assert json.loads(report.read_text())["verify"]["passed"] is False
