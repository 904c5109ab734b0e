"""Which of the two engines is kept, with TensorRT and the GPU stood in for: ONNX Runtime runs the plain engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from stof_onnx.errors import StofError
from stof_onnx.kernels.select import Device
from stof_onnx.options import DimRange
from stof_onnx.trt import availability, choose, cuda
from stof_onnx.trt.build import BuildOptions, BuiltEngine
from stof_onnx.trt.compare import EngineError, measure, passes
from stof_onnx.trt.session import Timing
from stof_onnx.verify.session import Runner

from benchmarks.encoder import EncoderSpec, build_encoder

SHAPE = (2, 64, 32)


class World:
    """What the stand-ins do: milliseconds of each engine, an error added to the stof engine, builds that fail."""

    ms: dict[str, float]
    stof_error = 0.0
    broken: tuple[str, ...] = ()

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.ms = {"plain": 2.0, "stof": 1.0}

    def build(self, model: Path, options: BuildOptions) -> BuiltEngine:
        kind = "stof" if any(n.op_type == "StofAttention" for n in onnx.load(str(model)).graph.node) else "plain"
        assert (options.plugins is not None) == (kind == "stof")
        if kind in self.broken:
            raise StofError("TensorRT built no engine", str(model))
        return BuiltEngine(kind.encode(), 1.0)

    def session(self, data: bytes) -> SimpleNamespace:
        kind = data.decode()
        timing = Timing(self.ms[kind], 0, 0, True, 10)

        def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            shift = self.stof_error if kind == "stof" else 1e-4
            return {n: a + np.float32(shift) for n, a in self.runner.run(feeds).items()}

        return SimpleNamespace(run=run, time=lambda feeds: timing, close=lambda: None, memory=1 << 20)


@pytest.fixture
def world(bench, monkeypatch):
    model = build_encoder(EncoderSpec(1, 32, 4, SHAPE[0], SHAPE[1]), np.tri(SHAPE[1], dtype=bool))
    portable = bench.optimize(model)
    made = World(Runner(model, bench.folder))
    monkeypatch.setattr(choose, "build_engine", made.build)
    monkeypatch.setattr(choose, "EngineSession", made.session)
    monkeypatch.setattr(availability, "device", lambda: Device(90, 132))
    monkeypatch.setattr(availability, "tensorrt", lambda: SimpleNamespace(__version__="8.6.0"))
    monkeypatch.setattr(cuda, "name", lambda: "a GPU")
    monkeypatch.setattr(cuda, "identity", lambda: f"test-{os.getpid()}")
    library = bench.folder / "library.so"
    library.write_bytes(b"plugins")
    profile = {"x": tuple(DimRange(n, n, n) for n in SHAPE)}

    def make(keep: str = "faster") -> choose.EngineResult:
        rng = np.random.default_rng(1)
        feeds = [{"x": rng.standard_normal(SHAPE, np.float32)} for _ in range(2)]
        options = BuildOptions(profile=profile, plugins=library)
        target = bench.folder / "model.stof.engine"
        return choose.make_engine(bench.folder / "model.onnx", portable, target, options, feeds, made.runner.run, keep)

    made.make = make
    made.folder = bench.folder
    return made


def test_the_faster_engine_is_kept(world):
    result = world.make()
    assert (result.kept, result.speedup) == ("stof", 2.0)
    assert result.path.read_bytes() == b"stof"
    manifest = json.loads((world.folder / "model.stof.json").read_text())
    assert manifest["plugin_library"]["embedded"]
    assert manifest["plugin_library"]["sha256"] == choose.digest(world.folder / "library.so")
    world.ms["stof"] = 2.1
    result = world.make()
    assert result.kept == "plain"
    assert result.path.read_bytes() == b"plain"
    assert json.loads((world.folder / "model.stof.json").read_text())["plugin_library"] is None


def test_a_wrong_engine_is_never_kept(world):
    world.stof_error = 0.5
    result = world.make()
    assert result.kept == "plain"
    assert "wrong outputs" in result.stof.problem
    with pytest.raises(StofError, match="wrong outputs"):
        world.make("stof")


def test_one_broken_build_leaves_the_other(world):
    world.broken = ("stof",)
    assert world.make().kept == "plain"
    world.broken = ("plain",)
    assert world.make().kept == "stof"
    world.broken = ("plain", "stof")
    (world.folder / "model.stof.engine").unlink()
    with pytest.raises(StofError, match="no engine"):
        world.make()
    assert not (world.folder / "model.stof.engine").exists()


def test_errors_are_judged_by_the_plain_engine():
    plain = EngineError(0.1, 0.01, 0)
    assert passes(EngineError(0.2, 0.02, 0), plain, "fp16")
    assert not passes(EngineError(0.3, 0.021, 0), plain, "fp16")
    assert not passes(EngineError(0.0, 0.0, 1), plain, "fp16"), "a NaN where the reference has none"
    assert passes(EngineError(0.0, 0.003, 0), EngineError(0, 0, 0), "fp16")
    assert not passes(EngineError(0.0, 0.003, 0), EngineError(0, 0, 0), "fp32")


def test_differences_are_measured_where_both_are_finite():
    nan, inf = np.nan, np.inf
    error = measure({"y": np.array([1.5, nan, inf, nan])}, {"y": np.array([1.0, nan, inf, 2.0])})
    assert error == EngineError(0.5, 0.25, 1)
    assert measure({"y": np.zeros((2, 3))}, {"y": np.zeros((2, 2))}).relative == inf
    assert measure({"y": np.ones((4, 3))}, {"y": np.ones((1, 3))}).relative == 0
