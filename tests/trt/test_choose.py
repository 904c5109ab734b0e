"""Which of the two engines is kept, with TensorRT and the GPU stood in for: ONNX Runtime runs the plain engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from stof_onnx import cli, summary
from stof_onnx.errors import StofError
from stof_onnx.fusion.search import Measurement
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.kernels.select import Device
from stof_onnx.options import DimRange
from stof_onnx.trt import availability, choose, cuda, fusion_step, region_nodes
from stof_onnx.trt.build import BuildOptions, BuiltEngine
from stof_onnx.trt.compare import EngineError, measure, passes
from stof_onnx.trt.mix import sites_to_leave
from stof_onnx.trt.plugin_nodes import SiteLowering
from stof_onnx.trt.session import Timing
from stof_onnx.verify.session import Runner

from benchmarks.encoder import EncoderSpec, build_encoder
from tests.trt.region_reference import as_text

SHAPE = (2, 64, 32)


class World:
    """What the stand-ins do: milliseconds of each engine, an error added to the stof engine, builds that fail."""

    ms: dict[str, float]
    stof_error = fused_error = 0.0
    broken: tuple[str, ...] = ()

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.ms = {"plain": 2.0, "stof": 1.0}
        self.layers: dict[str, float] = {}

    def build(self, model: Path, options: BuildOptions) -> BuiltEngine:
        kinds = [n.op_type for n in onnx.load(str(model)).graph.node]
        plugins = kinds.count("StofAttention")
        kind = "plain" if not plugins else "mixed" if "Softmax" in kinds else "stof"
        if "StofFusedRegion" in kinds:
            kind = "fused" if kind == "stof" else "fused mixed"
        assert (options.plugins is not None) == bool(plugins)
        if kind in self.broken:
            raise StofError("TensorRT built no engine", str(model))
        return BuiltEngine(kind.encode(), 1.0)

    def session(self, data: bytes) -> SimpleNamespace:
        kind = data.decode()
        timing = Timing(self.ms[kind], 0, 0, True, 10)

        def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            shift = 1e-4 if kind == "plain" else self.fused_error if "fused" in kind else self.stof_error
            return {n: a + np.float32(shift) for n, a in self.runner.run(feeds).items()}

        return SimpleNamespace(
            run=run,
            time=lambda feeds: timing,
            layer_times=lambda feeds: self.layers,
            close=lambda: None,
            memory=1 << 20,
            load_seconds=0.1,
        )


@pytest.fixture
def world(bench, monkeypatch):
    model = build_encoder(EncoderSpec(2, 32, 4, SHAPE[0], SHAPE[1]), np.tri(SHAPE[1], dtype=bool))
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
        expected = [made.runner.run(one) for one in feeds]
        target = bench.folder / "model.stof.engine"
        return choose.make_engine(bench.folder / "model.onnx", portable, target, options, feeds, expected, keep)

    made.make = make
    made.folder = bench.folder
    return made


def test_the_faster_engine_is_kept(world):
    result = world.make()
    assert (result.kept, result.speedup) == ("stof", 2.0)
    assert result.path.read_bytes() == b"stof"
    manifest = json.loads((world.folder / "model.stof.json").read_text(encoding="utf-8"))
    assert manifest["plugin_library"]["embedded"]
    assert manifest["plugin_library"]["sha256"] == choose.digest(world.folder / "library.so")
    world.ms["stof"] = 2.1
    result = world.make()
    assert result.kept == "plain"
    assert result.path.read_bytes() == b"plain"
    assert json.loads((world.folder / "model.stof.json").read_text(encoding="utf-8"))["plugin_library"] is None


def test_the_terminal_says_what_was_kept(world):
    def said() -> str:
        report = SimpleNamespace(engine_check=None, engine=world.make(), lowered=None, no_engine="")
        return "\n".join(summary._engine(report))

    assert "(stof)" in said() and "    2.00 times as fast as the plain engine" in said()
    world.ms["stof"] = 2.5
    assert "(plain)" in said() and "kept without plugins: with them it is 0.80 times as fast" in said()
    assert "StofAttention:" not in said(), "no kernel is named that the kept engine does not have"


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


@pytest.fixture
def fused_world(world, monkeypatch):
    """A portable file with fused regions of GEMMs."""
    monkeypatch.setenv("STOF_CACHE_DIR", str(world.folder / "cache"))
    monkeypatch.setattr(Roofline, "left", lambda self, piece: Measurement(1e4 * len(piece)))
    monkeypatch.setattr(region_nodes, "_compile", as_text)
    monkeypatch.setattr(fusion_step, "_timer", lambda *_: Roofline())
    source, target = world.folder / "model.onnx", world.folder / "model.stof.onnx"
    options = ["--no-verify", "--no-engine", "--tune-budget", "9s"]
    assert cli.main(["optimize", str(source), "-o", str(target), *options]) == 0
    world.ms |= {"fused": 0.8, "fused mixed": 0.7}
    return world


def test_regions_are_kept_where_they_are_faster(fused_world):
    """Attention only and attention with regions are both built from the one file, and the fastest engine is kept."""
    result = fused_world.make()
    assert (result.kept, result.speedup) == ("fused", 2.0 / 0.8)
    assert [c.kind for c in result.race.candidates] == ["plain", "stof", "fused"]
    assert result.lowered.fused == len(result.lowered.regions) > 0
    report = result.to_json()
    assert (report["plain"]["ms"], report["stof"]["ms"], report["fused"]["ms"]) == (2.0, 1.0, 0.8)
    manifest = json.loads((fused_world.folder / "model.stof.json").read_text(encoding="utf-8"))
    assert manifest["plugin_library"]["embedded"]
    fused_world.ms["fused"] = 1.1
    result = fused_world.make()
    assert (result.kept, result.speedup) == ("stof", 2.0)
    assert result.lowered.regions == []


def test_wrong_or_broken_regions_are_not_kept(fused_world):
    fused_world.fused_error = 0.5
    result = fused_world.make()
    assert result.kept == "stof" and "wrong outputs" in result.race.fused.problem
    fused_world.fused_error, fused_world.broken = 0.0, ("fused",)
    result = fused_world.make()
    assert result.kept == "stof" and "built no engine" in result.race.fused.problem


def test_regions_beside_attentions_that_are_left(fused_world):
    """Where the mixed engine wins, the engine with regions leaves the same attentions to TensorRT."""
    fused_world.ms |= {"stof": 1.5, "mixed": 1.4}
    fused_world.layers = {SITES[0]: 50.0, SITES[1]: 650.0, "the rest": 800.0}
    result = fused_world.make()
    assert (result.kept, result.speedup) == ("fused", 2.0 / 0.7)
    assert [s.kernel != "" for s in result.lowered.sites] == [True, False]


SITES = [f"layer{i}/p/Softmax/StofAttention" for i in range(2)]


def test_a_site_that_loses_is_left_to_tensorrt(world):
    """Dense attentions take 2000 - (1500 - 700) us, 600 each: the first plugin wins, the second one loses."""
    world.ms |= {"stof": 1.5, "mixed": 1.4}
    world.layers = {SITES[0]: 50.0, SITES[1]: 650.0, "the rest": 800.0}
    result = world.make()
    assert result.kept == "mixed"
    assert [s.kernel != "" for s in result.lowered.sites] == [True, False]
    assert result.speedup == pytest.approx(2 / 1.4)
    assert json.loads((world.folder / "model.stof.json").read_text(encoding="utf-8"))["plugin_library"]["embedded"]
    assert result.to_json()["mixed"]["ms"] == 1.4
    world.ms["mixed"] = 1.6
    result = world.make()
    assert result.kept == "stof"
    assert all(s.kernel for s in result.lowered.sites)
    world.broken = ("mixed",)
    assert world.make().kept == "stof"


@pytest.mark.parametrize("layers", [{SITES[0]: 50.0, SITES[1]: 60.0}, {SITES[0]: 50.0}, {}])
def test_no_mix_is_built_without_a_loser(world, layers):
    world.layers = layers
    assert world.make().race.mixed is None


def test_layers_are_found_under_numbered_names():
    sites = [SiteLowering("a", "block_sm90", dense_flops=1), SiteLowering("ab", "block_sm90", dense_flops=3)]
    layers = {"a_12": 90.0, "ab": 50.0, "abc": 1.0}
    assert sites_to_leave(sites, layers, 400.0, 340.0) == {"a"}  # 200 us for both: shares of 50 and 150
    assert sites_to_leave(sites, layers, 1000.0, 340.0) == frozenset()
    assert sites_to_leave(sites, layers, 201.0, 340.0) == frozenset(), "both lose: the plain engine has that"
    assert sites_to_leave(sites, layers | {"a_13": 1.0}, 400.0, 340.0) == frozenset(), "which of the two it is"


def test_errors_are_judged_by_the_plain_engine():
    plain = EngineError(0.1, 0.01, 0)
    assert passes(EngineError(0.2, 0.02, 0), plain, "fp16")
    assert not passes(EngineError(0.3, 0.021, 0), plain, "fp16")
    assert not passes(EngineError(0.0, 0.0, 1), plain, "fp16"), "a NaN where the reference has none"
    assert passes(EngineError(0.0, 0.003, 0), EngineError(0, 0, 0), "fp16")
    assert not passes(EngineError(0.0, 0.003, 0), EngineError(0, 0, 0), "fp32")


def test_without_a_plain_engine_its_usual_error_stands_in():
    assert passes(EngineError(0.0, 0.0079, 0), None, "fp16")
    assert not passes(EngineError(0.0, 0.0081, 0), None, "fp16")
    assert not passes(EngineError(0.0, 0.0, 1), None, "fp16")


def test_differences_are_measured_where_both_are_finite():
    nan, inf = np.nan, np.inf
    error = measure({"y": np.array([1.5, nan, inf, nan])}, {"y": np.array([1.0, nan, inf, 2.0])})
    assert error == EngineError(0.5, 0.25, 1)
    assert measure({"y": np.zeros((2, 3))}, {"y": np.zeros((2, 2))}).relative == inf
    assert measure({"y": np.ones((4, 3))}, {"y": np.ones((1, 3))}).relative == 0
    sampled = np.ma.array([[1.0, 2.0], [3.0, 8.0]], mask=[[False, True], [True, False]])
    assert measure({"y": np.array([[1.5, 0.0], [nan, 8.0]])}, {"y": sampled}) == EngineError(0.5, 0.0625, 0)
