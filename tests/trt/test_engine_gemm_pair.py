"""Regions of two GEMMs inside a TensorRT engine, against float64. Skipped without TensorRT and a GPU.

The kernels come from the cache or from Triton, whichever is there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.errors import StofError
from stof_onnx.kernels.cubin_program import CubinProgram
from stof_onnx.kernels.gemm_pair import GemmPair, PairConfig, configurations
from stof_onnx.kernels.triton_rows import compile_programs
from stof_onnx.options import DimRange
from stof_onnx.trt import cuda
from stof_onnx.trt.availability import device, why_no_engine
from stof_onnx.trt.build import BuildOptions, build_engine
from stof_onnx.trt.engine_step import find_plugin_library
from stof_onnx.trt.session import EngineSession

from tests.kernels.gemm_pair.cases import error_ratio, inputs

pytestmark = [pytest.mark.trt, pytest.mark.gpu, pytest.mark.skipif(bool(why_no_engine()), reason=why_no_engine())]
WIDTH = 264  # no multiple of any tile
PAIRS = (
    GemmPair(WIDTH, 64, WIDTH, "fp16", "relu", "none", True, True, True),
    GemmPair(WIDTH, 24, WIDTH, "fp16", "gelu_erf", "none", True, True, True),
    GemmPair(WIDTH, 128, WIDTH, "fp16", "gelu_tanh", "silu", False, True, False),
    GemmPair(WIDTH, 96, WIDTH, "fp16"),
)


def cases() -> list[tuple[GemmPair, PairConfig]]:
    """Every pair, the first one in every configuration."""
    found = [(PAIRS[0], config) for config in configurations(PAIRS[0])]
    return found + [(pair, configurations(pair)[0]) for pair in PAIRS[1:]]


def compiled(arch: int) -> list[CubinProgram]:
    """For tensors [b, s, WIDTH]."""
    try:
        return compile_programs([(pair, config, 3) for pair, config in cases()], (arch,))
    except StofError as error:
        pytest.skip(str(error))


@dataclass
class Regions:
    """A session of an engine in which all pairs read x[b, s, WIDTH] and the residual r, and their weights."""

    session: EngineSession
    weights: list[dict[str, np.ndarray]]

    def assert_right(self, feeds: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
        for i, ((pair, config), held) in enumerate(zip(cases(), self.weights, strict=True)):
            assert got[f"y{i}"].shape == feeds["x"].shape
            rows = {"x": feeds["x"].reshape(-1, WIDTH), "residual": feeds["r"].reshape(-1, WIDTH)}
            arrays = {name: {**held, **rows}[name].astype(np.float32) for name in pair.inputs}
            ratio = error_ratio(pair, arrays, got[f"y{i}"].reshape(-1, WIDTH).astype(np.float32))
            assert ratio <= 1.0, (pair, config.name, ratio)


def model(programs: list[CubinProgram], weights: list[dict[str, np.ndarray]]) -> onnx.ModelProto:
    nodes, initializers = [], []
    for i, ((pair, _), program, held) in enumerate(zip(cases(), programs, weights, strict=True)):
        names = {name: f"{name}_{i}" for name in held} | {"x": "x", "residual": "r"}
        initializers += [numpy_helper.from_array(array.astype(np.float16), names[n]) for n, array in held.items()]
        node = helper.make_node(
            "StofFusedRegion", [names[name] for name in pair.inputs], [f"y{i}"], f"region{i}", domain="stof",
            template="cubin", program=program.base64(), plugin_version="1", plugin_namespace="stof",
        )  # fmt: skip
        nodes.append(node)
    shape, half = ["b", "s", WIDTH], TensorProto.FLOAT16
    graph = helper.make_graph(
        nodes,
        "pairs",
        [helper.make_tensor_value_info(name, half, shape) for name in ("x", "r")],
        [helper.make_tensor_value_info(f"y{i}", half, shape) for i in range(len(nodes))],
        initializers,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stof", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    weights = []
    for pair, _ in cases():
        drawn = inputs(pair, 1, rng)
        weights.append({name: array for name, array in drawn.items() if name not in ("x", "residual")})
    path: Path = tmp_path_factory.mktemp("pairs") / "pairs.onnx"
    onnx.save(model(compiled(device().arch), weights), str(path))
    dims = DimRange(1, 2, 4), DimRange(1, 128, 512), DimRange(WIDTH, WIDTH, WIDTH)
    library = find_plugin_library()
    options = BuildOptions("fp16", {"x": dims, "r": dims}, plugins=library, embed=False, level=0)
    session = EngineSession(build_engine(path, options).data, library)
    yield Regions(session, weights)
    session.close()


def draw(batch: int, seq: int) -> dict[str, np.ndarray]:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((batch, seq, WIDTH)).astype(np.float16) for name in ("x", "r")}


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (2, 128), (3, 77), (4, 512)])
def test_pairs_in_an_engine(regions: Regions, batch: int, seq: int) -> None:
    feeds = draw(batch, seq)
    regions.assert_right(feeds, regions.session.run(feeds))


def test_a_cuda_graph_replays_with_new_inputs(regions: Regions) -> None:
    session = regions.session
    session.run(draw(2, 100))
    graph = session.capture()
    assert graph is not None
    feeds = draw(2, 100)
    session.bind(feeds)
    cuda.call("cudaGraphLaunch", graph, session.stream)
    cuda.call("cudaStreamSynchronize", session.stream)
    regions.assert_right(feeds, session.fetch())
    cuda.call("cudaGraphExecDestroy", graph)
