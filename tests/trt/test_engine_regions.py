"""GEMM regions in one TensorRT engine of dynamic rows, against float64. Skipped without TensorRT and a Hopper GPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import erf
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.errors import StofError
from stof_onnx.kernels import gemm
from stof_onnx.options import DimRange
from stof_onnx.trt import cuda
from stof_onnx.trt.availability import device, why_no_engine
from stof_onnx.trt.build import BuildOptions, build_engine
from stof_onnx.trt.engine_step import find_plugin_library
from stof_onnx.trt.session import EngineSession

from tests.trt.region_reference import rotated


def why_not() -> str:
    return why_no_engine() or ("" if device().arch == 90 else "needs a Hopper GPU")


pytestmark = [pytest.mark.trt, pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not())]
EPSILON = 1e-5
WIDTH, HIDDEN = 264, 520  # neither a multiple of any tile
POSITIONS, HEAD_DIM, ROTATED = 96, 40, 440  # of regions with a rotation, which have an input of fixed sequence
ACTIVATIONS = ("none", "relu", "gelu_erf", "gelu_tanh", "silu")
INPUTS: dict[str, tuple[str | int, int]] = {"x": ("s", WIDTH), "z": (POSITIONS, WIDTH), "r": ("s", HIDDEN)}


@dataclass(frozen=True)
class Region:
    """A node on x[B, S, WIDTH], or on z[B, POSITIONS, WIDTH] where columns are rotated."""

    template: str = "gemm_epilogue"
    activation: str = "none"
    bias: bool = True
    residual: bool = False
    config: str = gemm.AUTO
    kind: str = ""  # of gemm_norm
    keep_sum: bool = False
    rotated: bool = False

    def attributes(self) -> dict[str, object]:
        if self.template != "gemm_norm":
            return {"activation": self.activation}
        vectors = {"has_scale": 1, "has_shift": int(self.kind == "layer_norm")}
        return {"kind": self.kind, "epsilon": EPSILON, "keep_sum": int(self.keep_sum), **vectors}


def regions() -> list[Region]:
    activated = ("gemm_epilogue", "gated_mlp")
    found = [Region(t, a) for t in activated for a in ACTIVATIONS]
    found += [Region(t, "silu", bias=False, config=c) for t in activated for c in gemm.configs(t)]
    for config in (gemm.AUTO, *gemm.configs("gemm_norm")):
        found.append(Region("gemm_norm", residual=True, config=config, kind="layer_norm"))
        found.append(Region("gemm_norm", bias=False, config=config, kind="rms_norm", keep_sum=True))
    found += [Region(config=c, rotated=True) for c in (gemm.AUTO, *gemm.configs("gemm_epilogue"))]
    found.append(Region(bias=False, rotated=True))
    return found + [
        Region("gemm_epilogue", a, residual=True, bias=b) for a in ("none", "gelu_erf") for b in (True, False)
    ]


def activate(x: np.ndarray, activation: str) -> np.ndarray:
    if activation == "relu":
        return np.maximum(x, 0)
    if activation == "gelu_erf":
        return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))
    if activation == "gelu_tanh":
        return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x)) if activation == "silu" else x


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    found = {f"w{i}": rng.standard_normal((WIDTH, HIDDEN)) * WIDTH**-0.5 for i in range(2)}
    found |= {name: rng.standard_normal(HIDDEN) for name in ("b0", "b1", "scale", "shift")}
    angles = rng.uniform(0, 7, (POSITIONS, HEAD_DIM // 2))
    turns = np.stack([np.cos(angles), np.sin(angles)], -1).reshape(POSITIONS, HEAD_DIM)
    return {name: array.astype(np.float16) for name, array in found.items()} | {"turns": turns.astype(np.float32)}


def inputs_of(region: Region) -> list[str]:
    """Names of the inputs, in the contract's order."""
    factors = 2 if region.template == "gated_mlp" else 1
    names = ["z" if region.rotated else "x", *(f"w{i}" for i in range(factors))]
    names += [f"b{i}" for i in range(factors)] * region.bias
    vectors = [name for name in ("scale", "shift") if region.attributes().get(f"has_{name}")]
    return names + ["r"] * region.residual + ["turns"] * region.rotated + vectors


def outputs_of(region: Region, index: int) -> list[str]:
    return [f"y{index}", *[f"s{index}"] * region.keep_sum]


def reference(region: Region, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a region."""
    v = {name: array.astype(np.float64) for name, array in values.items()}
    x = v["z" if region.rotated else "x"]
    linear = [x @ v[f"w{i}"] + (v[f"b{i}"] if region.bias else 0) for i in range(2)]
    out = activate(linear[0], region.activation)
    if region.rotated:
        out = rotated(out, v["turns"], ROTATED, HEAD_DIM)
    if region.template == "gated_mlp":
        out = out * linear[1]
    out = out + v["r"] if region.residual else out
    if region.template != "gemm_norm":
        return [out]
    centred = out - out.mean(-1, keepdims=True) if region.kind == "layer_norm" else out
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * v["scale"]
    y = y + v["shift"] if region.kind == "layer_norm" else y
    return [y, out] if region.keep_sum else [y]


def model(constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    nodes = [
        helper.make_node(
            "StofFusedRegion",
            inputs_of(region),
            outputs_of(region, i),
            domain="stof",
            name=f"region{i}",
            template=region.template,
            has_bias=int(region.bias),
            has_residual=int(region.residual),
            config=region.config,
            rotated_columns=ROTATED * region.rotated,
            head_dim=HEAD_DIM * region.rotated,
            plugin_version="1",
            plugin_namespace="stof",
            **region.attributes(),
        )
        for i, region in enumerate(regions())
    ]
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        nodes,
        "regions",
        [helper.make_tensor_value_info(name, half, ["b", s, w]) for name, (s, w) in INPUTS.items()],
        [helper.make_tensor_value_info(name, half, ["b", None, HIDDEN]) for n in nodes for name in n.output],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stof", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    """A session, and the constants of its regions."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    constants = weights(np.random.default_rng(seed))
    folder: Path = tmp_path_factory.mktemp("regions")
    onnx.save(model(constants), str(folder / "regions.onnx"))
    profile = profile_of(DimRange(1, 2, 4), DimRange(1, 128, 512))
    library = find_plugin_library()
    options = BuildOptions("fp16", profile, plugins=library, embed=False, level=0)
    session = EngineSession(build_engine(folder / "regions.onnx", options).data, library)
    yield session, constants
    session.close()


def profile_of(batch: DimRange, seq: DimRange) -> dict[str, tuple[DimRange, ...]]:
    def fixed(size: int) -> DimRange:
        return DimRange(size, size, size)

    return {n: (batch, fixed(s) if isinstance(s, int) else seq, fixed(w)) for n, (s, w) in INPUTS.items()}


def feeds(rng: np.random.Generator, batch: int, seq: int) -> dict[str, np.ndarray]:
    shapes = {n: (batch, s if isinstance(s, int) else seq, w) for n, (s, w) in INPUTS.items()}
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def assert_right(got: dict[str, np.ndarray], values: dict[str, np.ndarray]) -> None:
    for i, region in enumerate(regions()):
        for name, wanted in zip(outputs_of(region, i), reference(region, values), strict=True):
            assert got[name].shape == wanted.shape, region
            error = np.abs(got[name].astype(np.float64) - wanted)
            assert (error <= 1e-3 * np.abs(wanted) + 1e-3).all(), (region, name, error.max())


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (2, 128), (3, 77), (4, 512)])
def test_regions_in_an_engine(engine, rng, batch, seq):
    session, constants = engine
    given = feeds(rng, batch, seq)
    assert_right(session.run(given), {**constants, **given})


def test_a_cuda_graph_replays_with_new_inputs(engine, rng):
    session, constants = engine
    session.run(feeds(rng, 2, 100))
    graph = session.capture()
    assert graph is not None
    given = feeds(rng, 2, 100)
    session.bind(given)
    cuda.call("cudaGraphLaunch", graph, session.stream)
    cuda.call("cudaStreamSynchronize", session.stream)
    assert_right(session.fetch(), {**constants, **given})
    cuda.call("cudaGraphExecDestroy", graph)


def test_a_variant_that_the_library_lacks_is_named(tmp_path, capfd):
    broken = model(weights(np.random.default_rng(0)))
    next(a for a in broken.graph.node[0].attribute if a.name == "config").s = b"fastest"
    onnx.save(broken, str(tmp_path / "broken.onnx"))
    profile = profile_of(DimRange(1, 1, 1), DimRange(1, 1, 1))
    options = BuildOptions("fp16", profile, plugins=find_plugin_library(), embed=False, level=0)
    with pytest.raises(StofError) as error:
        build_engine(tmp_path / "broken.onnx", options)
    # The plugin's own words go to TensorRT's logger, or to stderr where TensorRT gives it none.
    assert "'config' is 'fastest'" in str(error.value) + capfd.readouterr().err
