"""Regions without a GEMM as row programs: the operators of the body, one by one, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx

from stof_onnx.errors import StofError
from stof_onnx.fusion.segment import attribute
from stof_onnx.fusion.templates.algebra import FUNCTIONS
from stof_onnx.graph.proto_graph import attributes_of, constant_value
from stof_onnx.kernels.triton_rows import RowBuilder, RowProgram, gelu_erf, gelu_tanh, layer_norm

_BINARY = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Max": "maximum"}
_UNARY = {**FUNCTIONS, "Neg": "neg"}
_FREE = frozenset({"Cast", "Identity", "Reshape"})


def row_program(
    nodes: Iterable[onnx.NodeProto],
    inputs: Sequence[str],
    vectors: Iterable[str],
    outputs: Sequence[str],
    width: int,
    dtype: str,
    value: Callable[[str], np.ndarray | None] = lambda name: None,
) -> RowProgram:
    """The program of a region that `norm` or `chain` has recognised.

    Args:
        nodes: its operators, in order; Constant nodes may be among them.
        inputs, outputs: tensors in the program's order.
        vectors: those inputs that are constants along the last axis.
        width: the last axis of everything else.
        dtype: "fp16", "bf16" or "fp32" of all tensors, whatever the model's own is.
        value: the numbers that no node makes, by name.

    Raises:
        StofError: an operator that has no translation.
    """
    b, known_vectors = RowBuilder(width), set(vectors)
    values: dict[str, int] = {}
    numbers: dict[str, float] = {}
    for name in inputs:
        values[name] = b.vector(dtype) if name in known_vectors else b.rows(dtype)
    for node in nodes:
        if node.op_type == "Constant":
            constant = constant_value(node)
            if constant is not None and constant.size == 1 and constant.dtype.kind == "f":
                numbers[node.output[0]] = float(constant.reshape(()))
            continue
        for name in node.input:
            found = value(name) if name not in values and name not in numbers else None
            if found is not None and found.size == 1 and found.dtype.kind == "f":
                numbers[name] = float(found.reshape(()))
        values[node.output[0]] = _translate(b, node, values, numbers)
    for name in outputs:
        b.output(values[name], dtype)
    return b.build()


def _translate(b: RowBuilder, node: onnx.NodeProto, values: Mapping[str, int], numbers: Mapping[str, float]) -> int:
    def of(name: str) -> int:
        if name in values:
            return values[name]
        if name in numbers:
            return b.constant(numbers[name])
        raise StofError(f"{node.op_type} reads '{name}', which is neither an input nor a number", "fused region")

    op, first = str(node.op_type), node.input[0]
    if op in _FREE:
        return of(first)
    if op in _UNARY:
        return b.op(_UNARY[op], of(first))
    if op in _BINARY and len(node.input) == 2:
        return b.op(_BINARY[op], of(first), of(node.input[1]))
    if op == "Reciprocal":
        return b.div(b.constant(1.0), of(first))
    if op == "Pow" and node.input[1] in numbers:
        return _power(b, of(first), numbers[node.input[1]])
    if op == "ReduceMean":
        return b.op("row_mean", of(first))
    if op == "Gelu":
        return (gelu_tanh if attributes_of(node).get("approximate") == "tanh" else gelu_erf)(b, of(first))
    if op == "LayerNormalization":
        scale, shift = (*(of(name) for name in node.input[1:3] if name), None, None)[:2]
        return layer_norm(b, of(first), scale, shift, attribute(node, "epsilon", 1e-5))
    raise StofError(f"{op} has no translation", "fused region", "Report this as a bug")


def _power(b: RowBuilder, x: int, exponent: float) -> int:
    if exponent == 0.5:
        return b.op("sqrt", x)
    return b.op("rsqrt", x) if exponent == -0.5 else b.pow(x, exponent)
