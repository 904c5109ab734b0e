"""Row programs that tests and the GPU check share, random ones among them, and inputs for them."""

from __future__ import annotations

import numpy as np
from stof_onnx.kernels.triton_rows import Kind, RowBuilder, RowProgram, activation_program, norm_program
from stof_onnx.kernels.triton_rows.ir import BINARY
from stof_onnx.kernels.triton_rows.reference import round_bf16

DTYPES = ("fp16", "bf16", "fp32")
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
# Of a program's fp32 arithmetic, beside the rounding of its outputs: sums of a row, exp and division of the GPU.
ARITHMETIC = 2e-6


def named(cols: int, dtype: str) -> dict[str, RowProgram]:
    """The programs that models need, at one width."""
    return {
        "layer_norm": norm_program("layer_norm", cols, dtype, add=False, eps=1e-12),
        "rms_norm": norm_program("rms_norm", cols, dtype, add=False),
        "add_layer_norm": norm_program("layer_norm", cols, dtype, add=True, bias=True),
        "add_layer_norm_sum": norm_program("layer_norm", cols, dtype, add=True, keep_sum=True),
        "add_rms_norm_sum": norm_program("rms_norm", cols, dtype, add=True, keep_sum=True),
        "bias_gelu_erf": activation_program("gelu_erf", cols, dtype, bias=True),
        "gelu_tanh": activation_program("gelu_tanh", cols, dtype),
        "silu_mul": activation_program("silu", cols, dtype, gated=True),
        "relu_bias": activation_program("relu", cols, dtype, bias=True),
        "mixed": mixed(cols, dtype),
    }


def mixed(cols: int, dtype: str) -> RowProgram:
    """Every kind of input and output, every reduction, other types in and out."""
    b = RowBuilder(cols)
    x, scale, vector = b.rows(dtype), b.column("fp32"), b.vector("bf16")
    y = b.mul(b.op("tanh", b.mul(x, scale)), vector)
    low, high = b.op("row_min", y), b.op("row_max", y)
    span = b.op("maximum", b.sub(high, low), b.constant(0.5))
    z = b.div(b.sub(y, low), span)
    b.output(z, dtype)
    b.output(b.op("row_sum", b.op("abs", b.op("exp", b.op("neg", x)))), "fp32")
    b.output(b.op("row_mean", b.round_to(y, "fp16")), "bf16")
    b.output(high, "fp16")
    return b.build()


def random_program(rng: np.random.Generator) -> RowProgram:
    """Straight-line code of random operations that keeps values in a range where all are well conditioned."""
    b = RowBuilder(int(rng.choice([1, 7, 8, 48, 100, 256, 300, 768])))
    values = [b.rows(str(rng.choice(DTYPES)))]
    for _ in range(rng.integers(0, 4)):
        kind = str(rng.choice(["rows", "vector", "column"]))
        values.append(getattr(b, kind)(str(rng.choice(DTYPES))))
    for _ in range(rng.integers(1, 10)):
        x, y = (values[i] for i in rng.integers(0, len(values), 2))
        kind = rng.integers(0, 5)
        if kind == 0:
            value = b.op("tanh", b.op(str(rng.choice([name for name in BINARY if name != "div"])), x, y))
        elif kind == 1:
            value = b.div(x, b.add(b.op("abs", y), b.constant(float(rng.uniform(0.5, 2)))))
        elif kind == 2:
            value = b.op(str(rng.choice(["neg", "erf", "sigmoid", "relu", "tanh"])), b.mul(x, b.constant(0.75)))
        elif kind == 3:
            value = b.pow(b.add(b.op("sigmoid", x), b.constant(0.5)), float(rng.choice([-2, -0.5, 0.5, 0.3, 2, 3])))
        else:
            # What varies over rows and columns can be reduced.
            whole = b.add(b.mul(x, b.constant(0.5)), values[0])
            value = b.op("tanh", b.op(str(rng.choice(["row_mean", "row_max", "row_min"])), whole))
        values.append(value)
    b.output(b.add(values[0], values[-1]), str(rng.choice(DTYPES)))
    b.output(b.mul(b.add(values[0], b.constant(1.0)), values[int(rng.integers(0, len(values)))]), "fp32")
    return b.build()


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest values of a type, as float32."""
    if dtype == "bf16":
        return round_bf16(array)
    return array.astype(np.float16 if dtype == "fp16" else np.float32).astype(np.float32)


def inputs(program: RowProgram, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Random inputs, float32 arrays of values their types can hold."""
    shapes = {Kind.ROWS: (rows, program.cols), Kind.VECTOR: (program.cols,), Kind.COLUMN: (rows, 1)}
    return [rounded(rng.standard_normal(shapes[given.kind]), given.dtype) for given in program.inputs]


def error_ratio(program: RowProgram, got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest error over its bound: one rounding of the output, and the arithmetic's error at the row's scale."""
    worst = 0.0
    for out, mine, exact in zip(program.outputs, got, wanted, strict=True):
        if mine.shape != exact.shape or not np.isfinite(mine).all():
            return float("inf")
        scale = np.maximum(np.abs(exact).max(axis=1, keepdims=True), 1.0)
        tiny = 2.0**-25 if out.dtype == "fp16" else 0.0  # half the distance of fp16's smallest numbers
        bound = UNIT[out.dtype] * np.abs(exact) * 1.01 + ARITHMETIC * scale + tiny
        worst = max(worst, float((np.abs(mine - exact) / bound).max()))
    return worst


def to_bytes(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that the type can hold, in its own bits."""
    if dtype == "bf16":
        return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(array, np.float16 if dtype == "fp16" else np.float32)


def from_bytes(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes of a type as float32."""
    if dtype == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return raw.view(np.float16 if dtype == "fp16" else np.float32).reshape(shape).astype(np.float32)
