"""Exports without weights: the graph and the declaration of the ordinary export, and weights drawn on disk."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from stof_models import cli
from stof_models.errors import ExportError
from stof_models.export import export_model
from stof_models.info import ExportInfo, info_path
from stof_models.large import export_large
from stof_models.options import ExportOptions
from stof_models.seeded import fill, manifest_path

# How far shapes and tables are folded differs, what computes on activations must not.
COMPUTES = ("MatMul", "Gemm", "Softmax", "Add", "Tanh", "Erf", "Sigmoid", "ReduceMean", "Transpose", "Sqrt", "Pow")


def _operators(path: Path) -> Counter[str]:
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes if node.op_type in COMPUTES)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("dynamic", ["none", "sequence"])
def test_same_graph_as_the_ordinary_export(family: str, dynamic: str, tmp_path: Path) -> None:
    options = ExportOptions(family, mask="bigbird", dynamic=dynamic, batch=1)
    large, ordinary = tmp_path / "large.onnx", tmp_path / "ordinary.onnx"
    info, wanted = export_large(options, large), export_model(options, ordinary)
    assert _operators(large) == _operators(ordinary)
    assert info.sites == wanted.sites
    assert info.inputs == wanted.inputs
    assert ExportInfo.load(info_path(large)).sites == info.sites
    feed = info.random_inputs(np.random.default_rng(2))
    results = [
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)[0]
        for path in (large, ordinary)
    ]
    assert results[0].shape == results[1].shape
    assert results[0].std() == pytest.approx(results[1].std(), rel=0.1)


def test_every_weight_is_drawn_with_its_dtype_and_size(tmp_path: Path) -> None:
    options = ExportOptions("gpt2", dtype="fp16", layers=3, batch=1)
    path = tmp_path / "gpt.onnx"
    export_large(options, path)
    lines = json.loads(manifest_path(path).read_text(encoding="utf-8"))
    assert {line["dtype"] for line in lines} == {"float16"}
    count = sum(int(np.prod(line["shape"])) for line in lines)
    hidden = options.hidden
    layer = 12 * hidden**2 + 13 * hidden
    assert count == 3 * layer + (options.vocab + options.seq) * hidden + 2 * hidden
    assert len({line["seed"] for line in lines}) == len(lines)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(path)).graph.initializer}
    for line in lines:
        values = arrays[line["name"]].astype(np.float64)
        assert values.std() == pytest.approx(line["std"], rel=0.15)
        assert values.mean() == pytest.approx(line["mean"], abs=0.05)


def test_graph_only(tmp_path: Path) -> None:
    small, whole = tmp_path / "small.onnx", tmp_path / "whole.onnx"
    options = ExportOptions("llama", layers=1, batch=1)
    export_large(options, small, graph_only=True)
    assert not (tmp_path / "small.onnx.data").exists()
    fill(small)
    export_large(replace(options), whole)
    assert (tmp_path / "small.onnx.data").read_bytes() == (tmp_path / "whole.onnx.data").read_bytes()


def test_only_text_models_of_torchscript(tmp_path: Path) -> None:
    for options in (ExportOptions("bert", exporter="dynamo", opset=18), ExportOptions("vit")):
        with pytest.raises(ExportError, match="torchscript"):
            export_large(options, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_presets_change_defaults_only(tmp_path: Path) -> None:
    path = tmp_path / "bert.onnx"
    arguments = ["bert", "--preset", "bert-base", "--layers", "1", "--seq", "32", "--graph-only", "-o", str(path)]
    assert cli.main(arguments) == 0
    options = ExportInfo.load(info_path(path)).options
    assert (options["hidden"], options["heads"], options["layers"], options["seq"]) == (768, 12, 1, 32)


def test_the_large_preset_runs_when_made_small(tmp_path: Path) -> None:
    path = tmp_path / "gpt.onnx"
    small = ["--layers", "1", "--hidden", "64", "--heads", "2", "--vocab", "100", "--seq", "24"]
    assert cli.main(["gpt2", "--preset", "gpt-1.3b", *small, "-o", str(path)]) == 0
    feed = ExportInfo.load(info_path(path)).random_inputs(np.random.default_rng(0))
    (output,) = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)
    assert output.dtype == np.float16
    assert np.isfinite(output).all()
