"""Exports against their declarations, by what the exported graph computes: eager attention's own probabilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from stof_models.export import export_model
from stof_models.families import FAMILIES
from stof_models.info import ExportInfo, info_path
from stof_models.options import ExportOptions

EAGER = ExportOptions("bert", attention="eager", seq=36, heads=2, hidden=32)
VARIANTS: dict[str, dict[str, Any]] = {
    "native": {},
    "window": {"mask": "window", "mask_style": "bool"},
    "per-head": {"mask": "per-head", "mask_style": "additive"},
    "bigbird": {"mask": "bigbird", "mask_style": "function"},
    "padding": {"padding": True},
    "random-padding": {"mask": "random", "mask_style": "bool", "padding": True},
    "dynamic": {"dynamic": "sequence", "mask": "prefix-lm"},
}


def _cases() -> list[Any]:
    cases = []
    for name, family in FAMILIES.items():
        size = {"seq": 64} if name == "swin" else {}
        for variant, choices in VARIANTS.items():
            options = replace(EAGER, family=name, **{**choices, **size})
            if not family.why_not(options):
                cases.append(pytest.param(options, id=f"{name}-{variant}"))
    return cases


@pytest.mark.parametrize("options", _cases())
def test_probabilities_follow_the_declaration(options: ExportOptions, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = tmp_path / "model.onnx"
    info = export_model(options, path)
    assert ExportInfo.load(info_path(path)) == info
    entropy = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", entropy)
    feed = info.random_inputs(np.random.default_rng(entropy))
    found = _probabilities(path, feed)
    assert len(found) == len(info.sites)
    for site, probabilities in zip(info.sites, found, strict=True):
        batch = options.batch * site.batch_factor
        probabilities = probabilities.reshape(batch, site.heads, *probabilities.shape[-2:])
        allowed = np.broadcast_to(site.expected_mask(info.dims), probabilities.shape)
        if site.padding:
            allowed = allowed & _padding(site.name, feed)[:, None, None, :]
        if site.batch_factor > 1:  # shifted windows: a bias of -100 inside
            continue
        seen = allowed.any(axis=-1)  # what other rows yield is the exporter's affair
        assert np.array_equal(probabilities[seen] > 0, allowed[seen]), site.name


def _probabilities(path: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of every Softmax, in execution order."""
    model = onnx.load(str(path))
    names = [node.output[0] for node in model.graph.node if node.op_type == "Softmax"]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(names, feed))


def _padding(site: str, feed: dict[str, np.ndarray]) -> np.ndarray:
    names = ("encoder_attention_mask",) if "cross" in site else ("attention_mask", "decoder_attention_mask")
    return next(feed[name] for name in names if name in feed).astype(bool)


@pytest.mark.parametrize("opset", [18, 23])
def test_dynamo_agrees_with_torchscript(opset: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    options = replace(EAGER, family="llama", mask="longformer", padding=True, attention="sdpa")
    results = []
    for name, choices in (("a", {}), ("b", {"exporter": "dynamo", "opset": opset})):
        path = tmp_path / f"{name}.onnx"
        info = export_model(replace(options, **choices), path)
        assert next(o.version for o in onnx.load(str(path)).opset_import if not o.domain) == (opset if choices else 17)
        feed = info.random_inputs(np.random.default_rng(0), padded=False)
        results.append(ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)[0])
    assert np.abs(results[0] - results[1]).max() < 1e-5 * np.abs(results[0]).max()


@pytest.mark.parametrize(("exporter", "opset"), [("torchscript", 17), ("dynamo", 18)])
def test_weights_beside_the_model(exporter: str, opset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens above 2 GB, at a size that a test can afford."""
    torch.set_num_threads(1)
    options = replace(EAGER, exporter=exporter, opset=opset)
    info = export_model(options, tmp_path / "inside.onnx")
    monkeypatch.setattr("stof_models.export.EXTERNAL_DATA_ABOVE", 0)
    export_model(options, tmp_path / "beside.onnx")
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"inside.onnx", "inside.json", "beside.onnx", "beside.onnx.data", "beside.json"}
    tensors = onnx.load(str(tmp_path / "beside.onnx"), load_external_data=False).graph.initializer
    assert max(len(t.raw_data) for t in tensors) <= 1024
    feed = info.random_inputs(np.random.default_rng(0))
    inside, beside = (
        ort.InferenceSession(str(tmp_path / f"{name}.onnx"), providers=["CPUExecutionProvider"]).run(None, feed)[0]
        for name in ("inside", "beside")
    )
    assert np.array_equal(inside, beside)
