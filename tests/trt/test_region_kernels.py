"""Kernels compiled ahead of time serve a model's regions where there is no Triton; the plugins take the programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from stof_onnx import cli
from stof_onnx.fusion.search import Measurement
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.graph.proto_graph import attributes_of
from stof_onnx.kernels.select import Device
from stof_onnx.kernels.triton_rows import cache
from stof_onnx.trt.lower import LowerOptions, lower_file

from benchmarks.encoder import EncoderSpec, build_encoder
from tests.trt.plugins.conftest import BUILT, adapters
from tests.trt.plugins.host import F16, Host, Tensor

SEQ, HIDDEN = 40, 64
MASK = np.abs(np.arange(SEQ)[:, None] - np.arange(SEQ)[None]) <= 5
needs_triton = pytest.mark.skipif(cache.triton_version() is None, reason="needs triton")
SHAPE = ["--shape", f"x:1x{SEQ}x{HIDDEN}:2x{SEQ}x{HIDDEN}:8x{SEQ}x{HIDDEN}"]


def shapes_of(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Of the initializers, which the regions read as fp16."""
    return {t.name: tuple(t.dims) for t in model.graph.initializer if t.data_type == TensorProto.FLOAT16}


@needs_triton
@pytest.mark.slow
def test_kernels_of_a_model_are_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))
    source, target = tmp_path / "model.onnx", tmp_path / "model.stof.onnx"
    onnx.save(build_encoder(EncoderSpec(2, HIDDEN, 4, "batch", SEQ, pre_norm=True, seed=1), MASK), str(source))
    assert cli.main(["kernels", "compile", str(source), *SHAPE, "--arch", "90", "--jobs", "2"]) == 0

    monkeypatch.setattr(cache, "triton_version", lambda: None)
    monkeypatch.setattr(Roofline, "left", lambda self, piece: Measurement(1e4 * len(piece)))
    assert cli.main(["optimize", str(source), "-o", str(target), "--no-engine", "--tune-budget", "60s", *SHAPE]) == 0
    lowered = lower_file(target, LowerOptions(device=Device(90))).model
    nodes = [n for n in lowered.graph.node if n.op_type == "StofFusedRegion"]
    programs = [n for n in nodes if attributes_of(n)["template"] == "cubin"]
    assert len(programs) >= 3
    weights = shapes_of(lowered)
    for version, library in adapters():
        host = Host(BUILT / f"libhost_{version}.so", library, "StofFusedRegion")
        for node in programs:
            attributes = {a.name: onnx.helper.get_attribute_value(a).decode() for a in node.attribute}
            plugin = host.create(attributes)
            assert plugin, host.log()
            planned = []
            for rows in ((2 * SEQ, HIDDEN), (2, SEQ, HIDDEN)):  # rows may have been flattened
                inputs = [Tensor(weights.get(name, rows), F16) for name in node.input]
                wanted = [rows] * len(node.output)
                if plugin.output_shapes(inputs, len(wanted)) == wanted:
                    planned.append(plugin.configure([*inputs, *(Tensor(dims, F16) for dims in wanted)], len(wanted)))
            assert planned == [0]
        host.close()


def test_unknown_sizes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(build_encoder(EncoderSpec(1, HIDDEN, 4, "batch", SEQ), MASK), str(source))
    assert cli.main(["kernels", "compile", str(source), "-o", str(tmp_path / "kernels")]) == 2
    assert "Give --shape for every dynamic input" in capsys.readouterr().err
    assert not (tmp_path / "kernels").exists()
