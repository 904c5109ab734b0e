"""What a row program means, in float64: the judge of its kernels, and how to check one against ONNX operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from stof_onnx.errors import StofError
from stof_onnx.kernels.triton_rows.ir import REDUCTIONS, Op, RowProgram

Array = np.ndarray

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


_UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "erf": _erf,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0.0),
    "round_fp16": lambda x: x.astype(np.float16).astype(np.float64),
    "round_bf16": lambda x: round_bf16(x).astype(np.float64),
    "row_sum": lambda x: x.sum(1, keepdims=True),
    "row_mean": lambda x: x.mean(1, keepdims=True),
    "row_max": lambda x: x.max(1, keepdims=True),
    "row_min": lambda x: x.min(1, keepdims=True),
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


def round_bf16(x: Array) -> Array:
    """Nearest bf16 value, ties to even, as float32. NaN stays NaN."""
    single = np.ascontiguousarray(x, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(single), single, rounded)


def reference(program: RowProgram, arrays: Sequence[Array]) -> list[Array]:
    """The outputs of a program in float64, not rounded to their types.

    Args:
        arrays: the inputs: [rows, cols], [cols] or [rows, 1] as `program.inputs` says, of any float type.

    Returns:
        One array an output, [rows, cols] or [rows, 1].
    """
    values = [np.asarray(array, dtype=np.float64) for array in arrays]
    rows = next(value.shape[0] for value, given in zip(values, program.inputs, strict=True) if given.kind.per_row)
    for op in program.ops:
        whole = op.name in REDUCTIONS
        operands = [np.broadcast_to(values[i], (rows, program.cols)) if whole else values[i] for i in op.operands]
        values.append(_result(op, operands))
    kinds = program.kinds
    shapes = [(rows, program.cols if kinds[out.value].per_col else 1) for out in program.outputs]
    return [np.broadcast_to(values[out.value], shape) for out, shape in zip(program.outputs, shapes, strict=True)]


def scalar_values(program: RowProgram) -> dict[int, float]:
    """The values that vary over nothing, by their indices.

    Raises:
        StofError: one is not finite.
    """
    found: dict[int, float] = {}
    for i, op in enumerate(program.ops, len(program.inputs)):
        if all(j in found for j in op.operands):
            found[i] = float(_result(op, [np.asarray(found[j]) for j in op.operands]))
            if not math.isfinite(found[i]):
                raise StofError(f"the constant of operation {op.name} is {found[i]}", "row program")
    return found


def _result(op: Op, operands: Sequence[Array]) -> Array:
    with np.errstate(all="ignore"):
        if op.name == "constant":
            return np.asarray(op.constant)
        if op.name == "pow":
            return np.power(operands[0], op.constant)
        table: dict[str, Callable[..., Array]] = {**_UNARY, **_BINARY}
        return table[op.name](*operands)
