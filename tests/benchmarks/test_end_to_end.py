"""The waves of benchmarks.end_to_end, with TensorRT and the GPU stood in for: ONNX Runtime runs every engine."""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from stof_onnx.fusion.search import Measurement
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.kernels.select import Device
from stof_onnx.trt import availability, choose, cuda, fusion_step, region_nodes
from stof_onnx.trt.build import BuildOptions, BuiltEngine
from stof_onnx.trt.session import Timing
from stof_onnx.verify.session import Runner

from benchmarks import end_to_end
from benchmarks.end_to_end import Case, Wave
from tests.trt.region_reference import as_text

BUILDS: list[str] = []
MODELS: dict[tuple[int, ...], Runner] = {}  # plain ones by the shape of their input


class Here:
    """A pool whose jobs run at once, in this process."""

    def submit(self, function, *arguments):
        done: Future = Future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


def build(model: Path, options: BuildOptions) -> BuiltEngine:
    proto = onnx.load(str(model))
    plugins = any(n.op_type == "StofAttention" for n in proto.graph.node)
    BUILDS.append("stof" if plugins else "plain")
    if not plugins:
        MODELS[tuple(d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim)] = Runner(
            proto, model.parent
        )
    return BuiltEngine(BUILDS[-1].encode(), 1.0)


def session(data: bytes) -> SimpleNamespace:
    """A stof engine computes what the plain one of its size does, half as fast again."""
    plain = data == b"plain"
    return SimpleNamespace(
        run=lambda feeds: MODELS[feeds["x"].shape].run(feeds),
        time=lambda feeds: Timing(3.0 if plain else 2.0, 0, 0, True, 10),
        layer_times=lambda feeds: {"a layer": 5.0},
        close=lambda: None,
        memory=1 << 20,
        load_seconds=0.1,
    )


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    BUILDS.clear()
    MODELS.clear()
    monkeypatch.setattr(choose, "build_engine", build)
    monkeypatch.setattr(choose, "EngineSession", session)
    monkeypatch.setattr(availability, "device", lambda: Device(90, 132))
    monkeypatch.setattr(availability, "tensorrt", lambda: SimpleNamespace(__version__="8.6.0"))
    monkeypatch.setattr(end_to_end, "find_plugin_library", lambda: tmp_path / "library.so")
    monkeypatch.setattr(cuda, "name", lambda: "a GPU")
    monkeypatch.setattr(cuda, "identity", lambda: f"test-{os.getpid()}")
    return argparse.Namespace(
        work=str(tmp_path),
        seed=3,
        check=True,
        precision="fp16",
        timing_cache=None,
        plain_once=False,
        layers_table=True,
        embed=True,
        half_io=False,
        tune_budget=None,
    )


def test_each_case_has_its_engines(arguments):
    cases = [Case.parse("causal:2x128", 1), Case.parse("window:2x192x1", 2)]
    lines = list(Wave(Here(), Here(), arguments).run(cases))
    assert sorted(BUILDS) == ["plain", "plain", "stof", "stof"]
    for case, line in zip(cases, lines, strict=True):
        assert (line["mask"], line["B"], line["S"], line["layers"]) == (case.kind, case.batch, case.seq, case.layers)
        assert (line["plain_ms"], line["stof_ms"], line["speedup"], line["kept"]) == (3.0, 2.0, 1.5, "stof")
        assert line["plain_mask"] == case.kind and line["cuda_graph"] and line["layers_us"] == {"a layer": 5.0}
        assert line["mask_bytes"] > 0 and line["problems"] == []
        json.dumps(line)
        assert line["err_stof"] == line["err_plain"] < 1e-5, "against the first batch entry alone"


def test_fused_regions_have_a_line_of_their_own(arguments, monkeypatch):
    monkeypatch.setenv("STOF_CACHE_DIR", arguments.work)
    monkeypatch.setattr(Roofline, "left", lambda self, piece: Measurement(1e4 * len(piece)))
    monkeypatch.setattr(region_nodes, "_compile", as_text)
    monkeypatch.setattr(fusion_step, "_timer", lambda *_: Roofline())
    arguments.tune_budget = 9.0
    case = Case.parse("causal:2x128", 2)
    end_to_end.tune(case, arguments)
    lines = list(Wave(Here(), Here(), arguments).run([case]))
    assert [line["fusion"] for line in lines] == [False, True]
    assert BUILDS == ["plain", "stof", "stof"]
    assert (lines[1]["stof_ms"], lines[1]["attention_ms"], lines[1]["gain"]) == (2.0, 2.0, 1.0)
    assert len(lines[1]["regions"]) >= 8 and all(template for template, _, _ in lines[1]["regions"])
    json.dumps(lines)


def test_one_plain_engine_a_size(arguments):
    arguments.plain_once = True
    wave = Wave(Here(), Here(), arguments)
    first = list(wave.run([Case.parse("causal:1x128", 1)]))
    second = list(wave.run([Case.parse("window:1x128", 1), Case.parse("window:1x64", 1)]))
    assert BUILDS.count("plain") == 2 and BUILDS.count("stof") == 3
    assert [line["plain_mask"] for line in first + second] == ["causal", "causal", "window"]
    assert all(line["plain_ms"] == 3.0 for line in first + second)


def test_a_case_that_fails_leaves_the_others(arguments):
    lines = list(Wave(Here(), Here(), arguments).run([Case.parse("spiral:1x64", 1), Case.parse("causal:1x64", 1)]))
    assert "spiral" in lines[0]["failed"] and lines[1]["kept"] == "stof"


def test_sampled_rows_are_compared_where_scores_do_not_fit(arguments, monkeypatch):
    monkeypatch.setattr(end_to_end, "_MOST_SCORES", 1)
    (line,) = Wave(Here(), Here(), arguments).run([Case.parse("causal:1x256", 1)])
    assert 0 < line["err_plain"] < 1e-5
    assert np.isfinite(line["err_stof"])
