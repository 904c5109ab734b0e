"""Regions of compiled Triton kernels inside TensorRT engines, against float64. Skipped without TensorRT and a GPU.

The kernels come from the cache or from Triton, whichever is there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.errors import StofError
from stof_onnx.kernels.cubin_program import CubinProgram
from stof_onnx.kernels.triton_rows import RowProgram, compile_programs, reference
from stof_onnx.kernels.triton_rows.ir import Kind
from stof_onnx.options import DimRange
from stof_onnx.trt.availability import device, why_no_engine
from stof_onnx.trt.build import BuildOptions, build_engine, logger
from stof_onnx.trt.engine_step import find_plugin_library
from stof_onnx.trt.session import EngineSession

from tests.kernels.triton_rows.programs import named, rounded
from tests.trt.memory import device_memory

pytestmark = [pytest.mark.trt, pytest.mark.gpu, pytest.mark.skipif(bool(why_no_engine()), reason=why_no_engine())]
COLS, LARGEST = 768, 512
PROGRAMS = ("layer_norm", "add_layer_norm_sum", "add_rms_norm_sum", "bias_gelu_erf", "silu_mul")
TOLERANCE = 2e-3  # of the largest value: fp16 rounds the input, the output, and the weights


def compiled(programs: list[RowProgram], arch: int) -> list[CubinProgram]:
    try:
        return compile_programs([(program, None, 2) for program in programs], (arch,))
    except StofError as error:
        pytest.skip(str(error))


@dataclass
class Regions:
    """One engine with a region of each program, all fed from one input [rows, COLS] through a scale of their own."""

    library: Path
    programs: dict[str, RowProgram]
    weights: dict[str, np.ndarray]
    engine: bytes

    def feeds(self, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"x": rng.standard_normal((rows, COLS)).astype(np.float32)}

    def wanted(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = {}
        for name, program in self.programs.items():
            arrays = []
            for i, given in enumerate(program.inputs):
                weight = self.weights[f"{name}{i}"]
                arrays.append(rounded(weight if given.kind is Kind.VECTOR else feeds["x"] * weight, "fp16"))
            found |= {f"{name}_out{i}": out for i, out in enumerate(reference(program, arrays))}
        return found

    def assert_right(self, feeds: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
        wanted = self.wanted(feeds)
        assert set(got) == set(wanted)
        for name, exact in wanted.items():
            assert got[name].shape == exact.shape
            error = np.abs(got[name].astype(np.float64) - exact).max()
            assert error <= TOLERANCE * np.abs(exact).max(), (name, error)


def model(
    programs: dict[str, RowProgram], cubins: dict[str, CubinProgram], weights: dict[str, np.ndarray]
) -> onnx.ModelProto:
    nodes, outputs = [], []
    for name, program in programs.items():
        inputs = []
        for i, given in enumerate(program.inputs):
            inputs.append(f"{name}{i}")
            if given.kind is not Kind.VECTOR:
                inputs[-1] = f"{name}_in{i}"
                nodes.append(helper.make_node("Mul", ["x", f"{name}{i}"], [inputs[-1]]))
        found = [f"{name}_out{i}" for i in range(len(program.outputs))]
        region = helper.make_node(
            "StofFusedRegion", inputs, found, name, domain="stof", template="cubin", program=cubins[name].base64()
        )
        region.attribute.extend(
            [helper.make_attribute("plugin_version", "1"), helper.make_attribute("plugin_namespace", "stof")]
        )
        nodes.append(region)
        outputs += [helper.make_tensor_value_info(out, TensorProto.FLOAT, ["rows", COLS]) for out in found]
    graph = helper.make_graph(
        nodes,
        "regions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", COLS])],
        outputs,
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stof", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def draw_weights(programs: dict[str, RowProgram], rng: np.random.Generator) -> dict[str, np.ndarray]:
    weights = {}
    for name, program in programs.items():
        for i, given in enumerate(program.inputs):
            shape = (COLS,) if given.kind is Kind.VECTOR else (1,)
            weights[f"{name}{i}"] = rounded(rng.uniform(0.5, 1.5, shape), "fp16").astype(np.float32)
    return weights


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Regions:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    programs = {name: named(COLS, "fp16")[name] for name in PROGRAMS}
    cubins = dict(zip(programs, compiled(list(programs.values()), device().arch), strict=True))
    weights = draw_weights(programs, np.random.default_rng(seed))
    path = tmp_path_factory.mktemp("regions") / "model.onnx"
    onnx.save(model(programs, cubins, weights), str(path))
    profile = {"x": (DimRange(1, 64, LARGEST), DimRange(COLS, COLS, COLS))}
    library = find_plugin_library()
    built = build_engine(path, BuildOptions("fp16", profile, plugins=library, embed=False, level=0))
    return Regions(library, programs, weights, built.data)


def test_every_program_at_every_size(regions: Regions) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    session = EngineSession(regions.engine, regions.library)
    for rows in (1, 64, 511, LARGEST, 3):
        feeds = regions.feeds(rows, rng)
        regions.assert_right(feeds, session.run(feeds))
    session.close()


def test_contexts_share_the_kernels_and_graphs_capture_them(regions: Regions) -> None:
    rng = np.random.default_rng(secrets.randbits(32))
    first = EngineSession(regions.engine, regions.library)
    second = first.another()
    feeds = regions.feeds(100, rng)
    assert first.time(feeds, seconds=0.05).graph
    for session in (second, first):
        regions.assert_right(feeds, session.run(feeds))
    first.close()
    regions.assert_right(feeds, second.run(feeds))  # the modules live as long as a context needs them
    second.close()


def test_engines_give_their_kernels_back(regions: Regions) -> None:
    rng = np.random.default_rng(secrets.randbits(32))
    held = []
    for _ in range(12):
        session = EngineSession(regions.engine, regions.library)
        feeds = regions.feeds(10, rng)
        session.run(feeds)
        session.close()
        held.append(device_memory())
    assert held[-1] <= held[1], held


def test_kernels_for_other_gpus_are_refused(regions: Regions, tmp_path: Path) -> None:
    """Its code goes by the name of another architecture."""
    programs = {"layer_norm": named(COLS, "fp16")["layer_norm"]}
    good = compiled(list(programs.values()), device().arch)[0]
    foreign = tuple(tuple(replace(image, arch=75) for image in images) for images in good.kernels)
    weights = draw_weights(programs, np.random.default_rng(0))
    path = tmp_path / "model.onnx"
    onnx.save(model(programs, {"layer_norm": replace(good, kernels=foreign)}, weights), str(path))
    profile = {"x": (DimRange(1, 64, LARGEST), DimRange(COLS, COLS, COLS))}
    options = BuildOptions("fp16", profile, plugins=regions.library, embed=False, level=0)
    with pytest.raises(StofError, match="built no engine"):
        build_engine(path, options)
    assert any("has no code for this GPU" in error for error in logger().errors), logger().errors
