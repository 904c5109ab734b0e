"""Random graphs: lowered ones compute what ONNX Runtime makes of the original, with and without fused regions."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator
from stof_onnx import cli
from stof_onnx.fusion.search import Measurement
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.kernels.select import Device
from stof_onnx.trt import region_nodes
from stof_onnx.trt.lower import LowerOptions, lower_file

from tests.trt.plugin_reference import StofAttention
from tests.trt.random_graphs import RandomGraph
from tests.trt.region_reference import StofFusedRegion, as_text


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("number", range(12))
def test_random_graphs(
    number: int, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Roofline, "left", lambda self, piece: Measurement(1e4 * len(piece)))
    monkeypatch.setattr(region_nodes, "_compile", as_text)
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))
    seed = secrets.randbits(32)
    graph = RandomGraph(np.random.default_rng(seed))
    source, target = tmp_path / "m.onnx", tmp_path / "m.stof.onnx"
    model = graph.model()
    onnx.save(model, str(source))
    options = ["--tune-budget", "60s"] if fused else []
    if graph.dynamic:
        options += ["--shape", f"x:1x{graph.seq}x{graph.width}:{graph.batch}x{graph.seq}x{graph.width}"]
    assert cli.main(["optimize", str(source), "-o", str(target), "--no-engine", *options]) == 0, f"seed {seed}"
    capsys.readouterr()
    print(f"seed {seed}")
    original = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    sites = [n.name for n in onnx.load(str(target)).graph.node if n.op_type.startswith("StofAttention_")]
    for arch, precision, mark_runs in ((80, "fp16", False), (90, "fp16", True), (90, "fp32", False)):
        left = frozenset(name for name in sites if graph.chance(0.25))
        lower = LowerOptions(precision, Device(arch), graph.largest, graph.largest, left=left, mark_runs=mark_runs)
        lowered = lower_file(target, lower)
        evaluator = ReferenceEvaluator(lowered.model, new_ops=[StofAttention, StofFusedRegion])
        for batch in {graph.batch, 1} if graph.dynamic else {graph.batch}:
            feeds = graph.feeds(batch)
            for want, got in zip(original.run(None, feeds), evaluator.run(None, feeds), strict=True):
                assert want.shape == got.shape
                np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3, err_msg=f"seed {seed}, {arch}, {precision}")
