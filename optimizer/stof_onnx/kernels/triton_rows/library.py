"""Common pieces of row programs: norms and activations. Each takes the builder and values, and returns a value."""

from __future__ import annotations

import math

from stof_onnx.kernels.triton_rows.ir import RowBuilder, RowProgram


def layer_norm(b: RowBuilder, x: int, gamma: int | None, beta: int | None, eps: float) -> int:
    """(x - mean) / sqrt(var + eps) · gamma + beta, with the biased variance (ONNX LayerNormalization)."""
    centred = b.sub(x, b.op("row_mean", x))
    variance = b.op("row_mean", b.mul(centred, centred))
    return _affine(b, b.mul(centred, b.op("rsqrt", b.add(variance, b.constant(eps)))), gamma, beta)


def rms_norm(b: RowBuilder, x: int, gamma: int | None, eps: float) -> int:
    """x / sqrt(mean(x²) + eps) · gamma (LLaMA, T5)."""
    square = b.op("row_mean", b.mul(x, x))
    return _affine(b, b.mul(x, b.op("rsqrt", b.add(square, b.constant(eps)))), gamma, None)


def _affine(b: RowBuilder, x: int, gamma: int | None, beta: int | None) -> int:
    x = x if gamma is None else b.mul(x, gamma)
    return x if beta is None else b.add(x, beta)


def gelu_erf(b: RowBuilder, x: int) -> int:
    """x/2 · (1 + erf(x/√2))."""
    erf = b.op("erf", b.mul(x, b.constant(math.sqrt(0.5))))
    return b.mul(b.mul(x, b.constant(0.5)), b.add(erf, b.constant(1.0)))


def gelu_tanh(b: RowBuilder, x: int) -> int:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""
    cubic = b.add(x, b.mul(b.constant(0.044715), b.pow(x, 3.0)))
    tanh = b.op("tanh", b.mul(b.constant(math.sqrt(2 / math.pi)), cubic))
    return b.mul(b.mul(x, b.constant(0.5)), b.add(tanh, b.constant(1.0)))


def silu(b: RowBuilder, x: int) -> int:
    """x · sigmoid(x)."""
    return b.mul(x, b.op("sigmoid", x))


ACTIVATIONS = {
    "relu": lambda b, x: b.op("relu", x),
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
}


def norm_program(
    norm: str, cols: int, dtype: str, *, add: bool, bias: bool = False, keep_sum: bool = False, eps: float = 1e-5
) -> RowProgram:
    """`layer_norm` or `rms_norm` of a row, or of the sum of two.

    Inputs: x, [bias vector], [residual], gamma, [beta]. Outputs: [the sum], the norm.

    Args:
        add: a residual is added first; bias: a vector, too (a projection's bias); keep_sum: the sum is an output.
    """
    b = RowBuilder(cols)
    x = b.rows(dtype)
    if bias:
        x = b.add(x, b.vector(dtype))
    if add:
        x = b.add(x, b.rows(dtype))
    gamma = b.vector(dtype)
    if keep_sum:
        b.output(x, dtype)
    if norm == "layer_norm":
        y = layer_norm(b, x, gamma, b.vector(dtype), eps)
    else:
        y = rms_norm(b, x, gamma, eps)
    b.output(y, dtype)
    return b.build()


def activation_program(
    activation: str, cols: int, dtype: str, *, bias: bool = False, gated: bool = False
) -> RowProgram:
    """activation(x + bias), times a second tensor where gated. Inputs: x, [bias vector], [factor]."""
    b = RowBuilder(cols)
    x = b.rows(dtype)
    if bias:
        x = b.add(x, b.vector(dtype))
    y = ACTIVATIONS[activation](b, x)
    if gated:
        y = b.mul(y, b.rows(dtype))
    b.output(y, dtype)
    return b.build()


def standard_programs(cols: int, dtype: str) -> dict[str, RowProgram]:
    """What transformers compute along rows of hidden states, by name: what `stof-onnx kernels compile` compiles."""
    programs = {}
    for norm, eps in (("layer_norm", 1e-5), ("layer_norm", 1e-12), ("rms_norm", 1e-6), ("rms_norm", 1e-5)):
        programs[f"{norm} {eps:g}"] = norm_program(norm, cols, dtype, add=False, eps=eps)
        programs[f"add {norm} {eps:g}"] = norm_program(norm, cols, dtype, add=True, eps=eps)
        programs[f"bias add {norm} {eps:g}"] = norm_program(norm, cols, dtype, add=True, bias=True, eps=eps)
        programs[f"add {norm} {eps:g} and sum"] = norm_program(norm, cols, dtype, add=True, keep_sum=True, eps=eps)
    for activation in ACTIVATIONS:
        programs[f"bias {activation}"] = activation_program(activation, cols, dtype, bias=True)
        programs[f"{activation} mul"] = activation_program(activation, cols, dtype, gated=True)
    return programs
