"""Recognisers: every spelling that means the template, none that does not, and functions that compute the same."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from stof_onnx.fusion.apply import apply_plan
from stof_onnx.fusion.plan import BlockPlan, FusionPlan, PlannedRegion
from stof_onnx.fusion.search import Region
from stof_onnx.fusion.search.roofline import program_of
from stof_onnx.fusion.segment import Segment, block_hash
from stof_onnx.fusion.sequence import find_blocks
from stof_onnx.fusion.templates import Instance, NoMatch, recognise
from stof_onnx.kernels.triton_rows import reference as rows_reference

from tests.fusion.graphs import GraphBuilder, gelu_erf, gelu_tanh, tensors_of, whole
from tests.trt.region_reference import ACTIVATIONS


def program_reference(segment: Segment, instance: Instance, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What the kernel of a region without a GEMM is compiled from, evaluated in float64 on flattened rows."""
    program = program_of(Region(segment, instance), "fp32")
    arrays = [
        values[n].reshape(-1) if n in instance.vectors else values[n].reshape(-1, instance.width)
        for n in instance.inputs
    ]
    shape = values[instance.inputs[0]].shape
    return [y.reshape(shape) for y in rows_reference(program, arrays)]


def reference(instance: Instance, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What the contract says of the instance, in float64, from its inputs in its order."""
    turned = {1 + i for i, transposed in enumerate(instance.transposed) if transposed}
    arrays = [
        values[name].astype(np.float64).T if place in turned else values[name].astype(np.float64)
        for place, name in enumerate(instance.inputs)
    ]
    x, *rest = arrays
    a = instance.attributes
    if instance.template == "gemm_epilogue":
        y = x @ rest.pop(0)
        y = y + (rest.pop(0).reshape(-1) if a["has_bias"] else 0)
        y = ACTIVATIONS[str(a["activation"])](y)
        return [y + (rest.pop(0) if a["has_residual"] else 0)]
    if instance.template == "gated_mlp":
        gate, up = x @ rest[0], x @ rest[1]
        if a["has_bias"]:
            gate, up = gate + rest[2].reshape(-1), up + rest[3].reshape(-1)
        return [ACTIVATIONS[str(a["activation"])](gate) * up]
    if instance.template == "gemm_pair":
        first, second = rest.pop(0), rest.pop(0)
        hidden = x @ first + (rest.pop(0).reshape(-1) if a["inner_bias"] else 0)
        y = ACTIVATIONS[str(a["inner"])](hidden) @ second + (rest.pop(0).reshape(-1) if a["outer_bias"] else 0)
        return [ACTIVATIONS[str(a["outer"])](y) + (rest.pop(0) if a["has_residual"] else 0)]
    s = x @ rest.pop(0) if instance.template == "gemm_norm" else x
    s = s + (rest.pop(0).reshape(-1) if a["has_bias"] else 0)
    s = s + (rest.pop(0) if a["has_residual"] else 0)
    centred = s - s.mean(-1, keepdims=True) if a["kind"] == "layer_norm" else s
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + a["epsilon"])
    y = y * (rest.pop(0).reshape(-1) if a["has_scale"] else 1)
    y = y + (rest.pop(0).reshape(-1) if a["has_shift"] else 0)
    return [y, s] if a["keep_sum"] else [y]


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, feeds)


def check(b: GraphBuilder, *outputs: str, sizes: dict[str, int] | None = None) -> Instance:
    """Recognises all of the graph, and compares ONNX Runtime's original, its function and the contract's formula."""
    model = b.model(*outputs)
    segment = whole(model)
    instance = recognise(segment)
    assert isinstance(instance, Instance), instance
    assert set(instance.outputs) == set(outputs)
    feeds = b.feeds(sizes)
    values = feeds | {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    got = dict(zip(outputs, run(model, feeds), strict=True))
    wanted = [] if instance.template == "chain" else [reference(instance, values)]
    if instance.template in ("norm", "chain"):
        wanted.append(program_reference(segment, instance, values))
    for expected in wanted:
        for name, want in zip(instance.outputs, expected, strict=True):
            np.testing.assert_allclose(got[name], want, rtol=2e-4, atol=2e-4)
    again = run(_fused(model), feeds)
    for name, array in zip(outputs, again, strict=True):
        np.testing.assert_array_equal(array, got[name])
    return instance


def _fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its one block as a region."""
    segment = whole(model)
    operators = tuple(o.op for o in segment.operators)
    region = PlannedRegion(0, len(segment), segment.hash, operators, "", "auto", 1.0, 2.0, True, "")
    key = block_hash(segment.block)
    plan = FusionPlan("test", "fp32", {key: BlockPlan(key, "0" * len(segment), 1, (region,))})
    fused = onnx.ModelProto.FromString(model.SerializeToString())
    kept = list(fused.graph.initializer)
    applied = apply_plan(fused, kept, tensors_of(model), plan, 17)
    assert len(applied) == 1 and len(fused.graph.node) == 1
    assert {t.name for t in kept} == set(fused.graph.node[0].input) - {i.name for i in fused.graph.input}
    onnx.checker.check_model(fused, full_check=True)
    return fused


def _activated(b: GraphBuilder, x: str, activation: str, spelling: int = 0) -> str:
    if activation == "gelu_erf":
        return gelu_erf(b, x, spelling)
    if activation == "gelu_tanh":
        return gelu_tanh(b, x, spelling)
    if activation == "silu":
        return b.op("Mul", x, b.op("Sigmoid", x))
    if activation == "relu":
        return b.op("Relu", x) if spelling == 0 else b.op("Max", x, b.const(0.0))
    return x


def _builder(seed: int) -> GraphBuilder:
    print("seed", seed)
    return GraphBuilder(np.random.default_rng(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bias", ["none", "add", "left", "rank 3", "gemm", "gemm transposed"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gemm_epilogue(activation: str, bias: str, seed: int) -> None:
    b = _builder(seed)
    residual = seed % 2
    rows = [24] if bias.startswith("gemm") else [2, 12]
    x = b.input("x", *rows, 16)
    if bias.startswith("gemm"):
        transposed = bias.endswith("transposed")
        weight = b.weight(32, 16) if transposed else b.weight(16, 32)
        y = b.op("Gemm", x, weight, b.vector(32), transB=int(transposed))
    else:
        y = b.op("MatMul", x, b.weight(16, 32))
        if bias != "none":
            vector = b.const(b.rng.standard_normal((1, 1, 32))) if bias == "rank 3" else b.vector(32)
            y = b.op("Add", *((vector, y) if bias == "left" else (y, vector)))
    spellings = {"gelu_erf": 6, "gelu_tanh": 3, "relu": 2}.get(activation, 1)
    y = _activated(b, y, activation, seed % spellings if seed else spellings - 1)
    if residual:
        y = b.op("Add", *((y, b.input("r", *rows, 32)) if seed == 1 else (b.input("r", *rows, 32), y)))
    instance = check(b, y)
    wanted = {"activation": activation, "has_bias": int(bias != "none"), "has_residual": residual}
    assert instance.template == "gemm_epilogue" and instance.attributes == wanted
    assert (instance.rows, instance.width, instance.depth, instance.rank) == (24, 32, 16, len(rows) + 1)


@pytest.mark.parametrize("spelling", range(6))
def test_every_spelling_of_erf(spelling: int) -> None:
    b = _builder(spelling)
    y = gelu_erf(b, b.op("MatMul", b.input("x", 4, 8), b.weight(8, 8)), spelling)
    assert check(b, y).attributes["activation"] == "gelu_erf"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spelling", range(3))
def test_every_spelling_of_tanh(spelling: int, bias: bool) -> None:
    b = _builder(spelling)
    x = b.op("MatMul", b.input("x", 4, 8), b.weight(8, 8))
    x = b.op("Add", x, b.vector(8)) if bias else x
    assert check(b, gelu_tanh(b, x, spelling)).attributes["activation"] == "gelu_tanh"


def test_rows_behind_reshapes() -> None:
    """GPT-2's Conv1D: [B, S, C] to rows, Gemm, and back, with the residual behind it."""
    b = _builder(5)
    rows = b.op("Reshape", b.input("x", 2, 6, 8), b.const([-1, 8], np.int64))
    back = b.op("Reshape", b.op("Gemm", rows, b.weight(8, 16), b.vector(16)), b.const([2, 6, 16], np.int64))
    instance = check(b, b.op("Add", b.input("r", 2, 6, 16), back))
    assert instance.rank == 3 and instance.attributes["has_residual"] == 1


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "none"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", range(2))
def test_gated_mlp(activation: str, bias: bool, order: int) -> None:
    b = _builder(order)
    x = b.input("x", 2, 6, 8)
    parts = [b.op("MatMul", x, b.weight(8, 16)) for _ in range(2)]
    parts = [b.op("Add", p, b.vector(16)) for p in parts] if bias else parts
    gate = _activated(b, parts[order], activation)
    instance = check(b, b.op("Mul", gate, parts[1 - order]))
    assert instance.template == "gated_mlp" and instance.attributes == {"activation": activation, "has_bias": bias}


def _linear(b: GraphBuilder, x: str, depth: int, width: int, form: str) -> str:
    """x w (+ bias) as `form` says."""
    if form.startswith("gemm"):
        turned = form == "gemm transposed"
        weight = b.weight(width, depth) if turned else b.weight(depth, width)
        return b.op("Gemm", x, weight, b.vector(width), transB=int(turned))
    y = b.op("MatMul", x, b.weight(depth, width))
    return b.op("Add", y, b.vector(width)) if form == "add" else y


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", ["none", "add", "gemm", "gemm transposed"])
@pytest.mark.parametrize("inner", list(ACTIVATIONS))
def test_gemm_pairs(inner: str, form: str, seed: int) -> None:
    """Adapters and low-rank layers: every activation between the products, some behind them; x as the residual."""
    b = _builder(seed)
    outer = str(b.rng.choice(list(ACTIVATIONS)))
    residual, own = seed != 1, seed == 2
    rows = [24] if form.startswith("gemm") else [2, 12]
    x = b.input("x", *rows, 32)
    hidden = _activated(b, _linear(b, x, 32, 16, form), inner)
    y = _activated(b, _linear(b, hidden, 16, 32, "add" if form == "none" and own else form), outer)
    if residual:
        y = b.op("Add", x if own else b.input("r", *rows, 32), y)
    instance = check(b, y)
    assert instance.template == "gemm_pair" and instance.gemms == 2
    assert instance.attributes == {
        "hidden": 16,
        "inner": inner,
        "outer": outer,
        "inner_bias": int(form != "none"),
        "outer_bias": int(form != "none" or own),
        "has_residual": int(residual),
    }
    assert sum(instance.transposed) == (2 if form == "gemm transposed" else 0)
    assert (instance.rows, instance.width, instance.depth, instance.rank) == (24, 32, 32, len(rows) + 1)


def test_what_no_pair_of_gemms_is() -> None:
    def pair(depth: int, hidden: int, width: int) -> tuple[GraphBuilder, str, str]:
        b = _builder(depth + hidden + width)
        first = b.op("MatMul", b.input("x", 2, 12, depth), b.weight(depth, hidden))
        return b, first, b.op("MatMul", b.op("Relu", first), b.weight(hidden, width))

    b, _, y = pair(16, 136, 16)
    assert "at most 128 stay on the chip" in _refused(b, y)
    b, _, y = pair(16, 12, 16)
    assert "multiples of 8" in _refused(b, y)
    b, hidden, y = pair(16, 8, 16)
    assert "more than one" in _refused(b, y, hidden)
    b = _builder(0)
    first = b.op("MatMul", b.input("x", 2, 12, 16), b.weight(16, 8))
    total = b.op("Add", first, b.input("r", 2, 12, 8))
    assert "between the two" in _refused(b, b.op("MatMul", total, b.weight(8, 16)))
    b = _builder(1)
    activated = b.op("Relu", b.input("x", 2, 12, 16))
    first = b.op("MatMul", activated, b.weight(16, 8))
    assert "ahead of the first" in _refused(b, b.op("MatMul", first, b.weight(8, 16)))
    b = _builder(2)
    last = b.op("MatMul", b.input("x", 2, 12, 16), b.weight(16, 8))
    for width in (16, 8):
        last = b.op("MatMul", last, b.weight(24 - width, width))
    assert "3 GEMMs, at most 2" in _refused(b, last)


def _norm(b: GraphBuilder, s: str, kind: str, scale: bool, shift: bool, spelling: str) -> str:
    if spelling == "operator":
        return b.op("LayerNormalization", s, b.vector(16), *([b.vector(16)] if shift else []), axis=-1, epsilon=1e-3)
    centred = b.op("Sub", s, b.op("ReduceMean", s, axes=[-1], keepdims=1)) if kind == "layer_norm" else s
    square = b.op("Mul", centred, centred) if spelling == "inverse" else b.op("Pow", centred, b.const(2.0))
    safe = b.op("Add", b.op("ReduceMean", square, axes=[-1], keepdims=1), b.const(1e-3))
    root = b.op("Sqrt", safe)
    if spelling == "divide":
        y = b.op("Div", centred, root)
    elif spelling == "inverse":
        y = b.op("Mul", centred, b.op("Div", b.const(1.0), root))
    else:
        y = b.op("Mul", b.op("Reciprocal", root), centred)
    y = b.op("Mul", b.vector(16), y) if scale else y
    return b.op("Add", y, b.vector(16)) if shift else y


@pytest.mark.parametrize("spelling", ["operator", "divide", "inverse", "reciprocal"])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("seed", range(6))
def test_norms(kind: str, spelling: str, seed: int) -> None:
    if spelling == "operator" and kind == "rms_norm":
        pytest.skip("opset 17 has no RMSNormalization")
    b = _builder(seed)
    bias, residual, keep = (bool(bit) for bit in b.rng.integers(0, 2, 3))
    shift = kind == "layer_norm" and seed % 2 == 0
    scale = seed % 3 != 0 or spelling == "operator" or shift
    s = b.input("x", 2, 6, 16)
    s = b.op("Add", s, b.vector(16)) if bias else s
    s = b.op("Add", b.input("r", 2, 6, 16), s) if residual else s
    keep = keep and (bias or residual)
    y = _norm(b, s, kind, scale, shift, spelling)
    instance = check(b, y, *([s] if keep else []))
    a = instance.attributes
    assert (a["kind"], a["has_scale"], a["has_shift"], a["keep_sum"]) == (kind, scale, shift, keep)
    assert (a["has_bias"], a["has_residual"]) == (bias, residual)
    assert math.isclose(float(a["epsilon"]), 1e-3, rel_tol=1e-5)


@pytest.mark.parametrize("spelling", ["operator", "divide", "inverse", "reciprocal"])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("seed", range(6))
def test_gemm_norms(kind: str, spelling: str, seed: int) -> None:
    if spelling == "operator" and kind == "rms_norm":
        pytest.skip("opset 17 has no RMSNormalization")
    b = _builder(seed)
    bias, residual, keep, transposed = (bool(bit) for bit in b.rng.integers(0, 2, 4))
    shift = kind == "layer_norm" and seed % 2 == 0
    scale = seed % 3 != 0 or spelling == "operator" or shift
    if transposed:
        s = b.op("Gemm", b.input("x", 12, 24), b.weight(16, 24), *([b.vector(16)] if bias else []), transB=1)
    else:
        s = b.op("MatMul", b.input("x", 2, 6, 24), b.weight(24, 16))
        s = b.op("Add", s, b.vector(16)) if bias else s
    rows = [12] if transposed else [2, 6]
    s = b.op("Add", b.input("r", *rows, 16), s) if residual else s
    instance = check(b, _norm(b, s, kind, scale, shift, spelling), *([s] if keep else []))
    a = instance.attributes
    assert instance.template == "gemm_norm" and instance.gemms == 1 and instance.transposed == (transposed,)
    assert (a["kind"], a["has_scale"], a["has_shift"], a["keep_sum"]) == (kind, scale, shift, keep)
    assert (a["has_bias"], a["has_residual"]) == (bias, residual)
    assert (instance.rows, instance.width, instance.depth, instance.rank) == (12, 16, 24, len(rows) + 1)


def test_a_norm_of_something_else_than_a_gemm_and_a_third_output_are_refused() -> None:
    b = _builder(0)
    product = b.op("MatMul", b.input("x", 2, 6, 24), b.weight(24, 16))
    total = b.op("Add", product, b.input("r", 2, 6, 16))
    y = _norm(b, total, "layer_norm", True, True, "operator")
    assert "more than one of its tensors" in _refused(b, y, total, product)
    b = _builder(1)
    activated = b.op("Relu", b.op("MatMul", b.input("x", 2, 6, 24), b.weight(24, 16)))
    assert _refused(b, _norm(b, activated, "layer_norm", True, True, "operator"))


def test_half_precision() -> None:
    """Constants that fp16 has rounded still are what they stand for."""
    b = GraphBuilder(np.random.default_rng(0), np.float16)
    x = b.op("MatMul", b.input("x", 4, 8), b.weight(8, 8))
    instance = recognise(whole(b.model(gelu_tanh(b, x, 0))))
    assert isinstance(instance, Instance) and instance.attributes["activation"] == "gelu_tanh"
    assert instance.dtype == "fp16"


@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_that_fp16_models_compute_in_fp32(residual: bool) -> None:
    """LLaMA in fp16: to float32, RMSNorm, back, times the weight; the kernel computes in float32 throughout."""
    b = GraphBuilder(np.random.default_rng(1), np.float16)
    s = b.input("x", 2, 6, 16)
    s = b.op("Add", s, b.input("r", 2, 6, 16)) if residual else s
    wide = b.op("Cast", s, to=onnx.TensorProto.FLOAT)
    mean = b.op("ReduceMean", b.op("Pow", wide, b.const(2.0, np.float32)), axes=[-1], keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.const(1e-3, np.float32)))
    y = b.op("Mul", wide, b.op("Div", b.const(1.0, np.float32), root))
    y = b.op("Mul", b.vector(16), b.op("Cast", y, to=onnx.TensorProto.FLOAT16))
    model = b.model(y, *([s] if residual else []))
    segment = whole(model)
    instance = recognise(segment)
    assert isinstance(instance, Instance) and instance.template == "norm" and instance.dtype == "fp16"
    assert (instance.attributes["kind"], instance.attributes["keep_sum"]) == ("rms_norm", int(residual))
    feeds = b.feeds()
    values = feeds | {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    program = program_of(Region(segment, instance), "fp16")
    assert {given.dtype for given in program.inputs} == {"fp16"}
    for want in (reference(instance, values), program_reference(segment, instance, values)):
        np.testing.assert_allclose(run(model, feeds)[0], want[0], rtol=4e-3, atol=4e-3)


def test_wider_ends_are_refused() -> None:
    """What leaves in another type than it came is no region: its kernel has one type."""
    b = GraphBuilder(np.random.default_rng(2), np.float16)
    y = b.op(
        "Relu", b.op("Add", b.op("Cast", b.input("x", 4, 16), to=onnx.TensorProto.FLOAT), b.const(1.0, np.float32))
    )
    model = b.model()
    model.graph.output.append(onnx.helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, [4, 16]))
    found = recognise(whole(model))
    assert isinstance(found, NoMatch) and "mixes element types" in found.reason


def test_symbolic_axes() -> None:
    """Batch and sequence that are known at run time only."""
    b = _builder(6)
    x = b.input("x", "batch", "sequence", 8)
    y = b.op("Add", b.op("Add", b.op("MatMul", x, b.weight(8, 8)), b.vector(8)), x)
    instance = check(b, y, sizes={"batch": 3, "sequence": 5})
    assert instance.rows == 0, "nobody said what to tune for"


def _refused(b: GraphBuilder, *outputs: str) -> str:
    found = recognise(whole(b.model(*outputs)))
    assert isinstance(found, NoMatch), f"taken for {found}"
    assert found.reason
    return found.reason


@pytest.mark.parametrize("wrong", ["half", "root", "one", "cube", "scale"])
def test_wrong_numbers_are_no_gelu(wrong: str) -> None:
    b = _builder(7)
    x = b.op("MatMul", b.input("x", 4, 8), b.weight(8, 8))
    numbers = {"half": 0.5, "root": np.sqrt(2), "one": 1.0, "cube": 0.044715, "scale": np.sqrt(2 / np.pi)}
    numbers[wrong] *= 1.01
    if wrong in ("cube", "scale"):
        inner = b.op("Add", x, b.op("Mul", b.op("Pow", x, b.const(3.0)), b.const(numbers["cube"])))
        gate = b.op("Tanh", b.op("Mul", inner, b.const(numbers["scale"])))
    else:
        gate = b.op("Erf", b.op("Div", x, b.const(numbers["root"])))
    y = b.op("Mul", b.op("Mul", x, b.op("Add", gate, b.const(numbers["one"]))), b.const(numbers["half"]))
    _refused(b, y)


def test_a_residual_that_broadcasts_is_refused() -> None:
    b = _builder(8)
    y = b.op("MatMul", b.input("x", 4, 6, 8), b.weight(8, 8))
    assert "rows" in _refused(b, b.op("Add", y, b.input("r", 1, 6, 8)))


def test_one_bias_of_two_is_refused() -> None:
    b = _builder(9)
    x = b.input("x", 4, 8)
    gate = b.op("Sigmoid", g := b.op("Add", b.op("MatMul", x, b.weight(8, 8)), b.vector(8)))
    y = b.op("Mul", b.op("Mul", g, gate), b.op("MatMul", x, b.weight(8, 8)))
    assert "bias" in _refused(b, y)


@pytest.mark.parametrize("depth, width", [(12, 16), (16, 12)])
def test_sizes_that_no_kernel_takes(depth: int, width: int) -> None:
    b = _builder(10)
    assert "multiples of 8" in _refused(b, b.op("MatMul", b.input("x", 4, depth), b.weight(depth, width)))


def test_other_norms_are_not_taken_for_norms() -> None:
    b = _builder(11)
    s = b.input("x", 4, 16)
    square = b.op("Pow", s, b.const(2.0))
    safe = b.op("Sqrt", b.op("Add", b.op("ReduceMean", square, axes=[0], keepdims=1), b.const(1e-3)))
    _refused(b, b.op("Div", s, safe))
    b = _builder(12)
    s, other = b.input("x", 4, 16), b.input("y", 4, 16)
    mean = b.op("ReduceMean", b.op("Mul", other, other), axes=[-1], keepdims=1)
    assert check(b, b.op("Div", s, b.op("Sqrt", b.op("Add", mean, b.const(1e-3))))).template == "chain"
    b = _builder(13)
    s = b.input("x", 4, 16)
    centred = b.op("Sub", s, b.op("ReduceMean", s, axes=[-1], keepdims=1))
    mean = b.op("ReduceMean", b.op("Mul", s, s), axes=[-1], keepdims=1)  # of what is not centred
    assert check(b, b.op("Div", centred, b.op("Sqrt", b.op("Add", mean, b.const(1e-3))))).template == "chain"


@pytest.mark.parametrize("seed", range(25))
def test_chains(seed: int) -> None:
    """Random elementwise operators on rows, vectors, numbers and means."""
    b = _builder(seed)
    made = [b.input("x", 2, 6, 16), b.input("y", 2, 6, 16)]
    for _ in range(int(b.rng.integers(2, 9))):
        kind = str(b.rng.choice(["Add", "Sub", "Mul", "Max", "Sigmoid", "Tanh", "Erf", "Relu", "Neg", "Pow", "mean"]))
        first = str(b.rng.choice(made))
        if kind in ("Add", "Sub", "Mul"):
            choice = b.rng.integers(0, 3)
            second = str(b.rng.choice(made)) if choice == 0 else b.vector(16) if choice == 1 else b.const(0.7)
            pair = (first, second) if b.rng.integers(0, 2) else (second, first)
            made.append(b.op(kind, *pair))
        elif kind == "mean":
            mean = b.op("ReduceMean", first, axes=[-1], keepdims=1)
            made.append(b.op("Sub", first, mean))
        elif kind in ("Max", "Pow"):
            made.append(b.op(kind, first, b.const(0.0 if kind == "Max" else 2.0)))
        else:
            made.append(b.op(kind, first))
    read = {name for node in b.nodes for name in node.input}
    for name in [name for name in made[:-1] if name not in read]:
        made.append(b.op("Add", made[-1], name))
    instance = check(b, made[-1])
    assert instance.template in ("chain", "norm")


def test_a_scaled_gemm_and_a_second_output_are_refused() -> None:
    b = _builder(14)
    product = b.op("MatMul", b.input("x", 4, 8), b.weight(8, 8))
    assert "scaled" in _refused(b, b.op("Mul", product, b.const(0.25)))
    b = _builder(15)
    product = b.op("MatMul", b.input("x", 4, 8), b.weight(8, 8))
    assert "more than one" in _refused(b, b.op("Relu", product), product)


def test_a_residual_ahead_of_the_activation_is_refused() -> None:
    b = _builder(16)
    y = b.op("Add", b.op("MatMul", b.input("x", 4, 8), b.weight(8, 8)), b.input("r", 4, 8))
    assert "ahead of the activation" in _refused(b, b.op("Relu", y))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_one_weight_as_it_is_and_turned(pair: bool, first: int) -> None:
    """Tied weights: of an adapter, down and up."""
    b = GraphBuilder(np.random.default_rng(0))
    x, w = b.input("x", 6, 16), b.weight(16, 16)
    one = b.op("Gemm", x, w, transB=first)
    if pair:
        instance = check(b, b.op("Gemm", b.op("Relu", one), w, transB=1 - first))
    else:
        other = b.op("Gemm", x, w, transB=1 - first)
        instance = check(b, b.op("Mul", b.op("Mul", one, b.op("Sigmoid", one)), other))
    assert instance.template == ("gemm_pair" if pair else "gated_mlp")
    assert instance.transposed == (bool(first), not first)


def test_what_cancels_out_is_no_number() -> None:
    for kind, source in (("Pow", 2.0), ("Div", 0.0)):
        b = GraphBuilder(np.random.default_rng(0))
        x = b.input("x", 2, 5, 16)
        other = b.op("Add", b.op("Sub", x, x), b.const(source)) if source else b.op("Mul", x, b.const(0.0))
        found = recognise(whole(b.model(b.op("Mul", b.op(kind, x, other), b.const(3.0)))))
        assert isinstance(found, NoMatch), kind


def test_inputs_that_nothing_depends_on_are_no_part_of_a_region() -> None:
    """Added and taken away again."""
    b = GraphBuilder(np.random.default_rng(0))
    x, other = b.input("x", 2, 5, 16), b.input("other", 2, 5, 16)
    y = b.op("MatMul", x, b.weight(16, 16))
    y = b.op("Sub", b.op("Add", y, other), other)
    found = recognise(whole(b.model(b.op("Relu", y))))
    assert isinstance(found, NoMatch) and "do not depend" in found.reason


def test_operators_that_nothing_reads_are_no_part_of_a_region() -> None:
    """A row program would compute them, and may not even be able to."""
    b = GraphBuilder(np.random.default_rng(0))
    x = b.input("x", 2, 5, 16)
    y = b.op("Mul", x, b.vector(16))
    b.op("Min", y, b.const(1.0))
    found = recognise(whole(b.model(b.op("Relu", y))))
    assert isinstance(found, NoMatch) and found.reason == "nothing reads what Min makes"


def test_the_name_of_a_region_is_its_own() -> None:
    """Of a node without a name that of its output stands in, which may be another node's name."""
    b = GraphBuilder(np.random.default_rng(0))
    x = b.input("x", 2, 16)
    first = b.op("Relu", b.op("MatMul", x, b.weight(16, 16)))
    second = b.op("Relu", b.op("MatMul", first, b.weight(16, 16)))
    model = b.model(second)
    model.graph.node[1].name, model.graph.node[3].name = "", first
    tensors = tensors_of(model)
    (block,) = find_blocks(tensors)
    regions = [
        PlannedRegion(i, i + 2, Segment(block, i, i + 2).hash, ("MatMul", "Relu"), "", "auto", 1.0, 2.0, True, "")
        for i in (0, 2)
    ]
    key = block_hash(block)
    plan = FusionPlan("test", "fp32", {key: BlockPlan(key, "0011", 1, tuple(regions))})
    assert len(apply_plan(model, list(model.graph.initializer), tensors, plan, 17)) == 2
    names = [node.name for node in model.graph.node]
    assert len(names) == len(set(names)) == 2
