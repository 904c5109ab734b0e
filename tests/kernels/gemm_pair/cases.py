"""Pairs of GEMMs that tests share, inputs for them, and how far a kernel may be off."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from stof_onnx.kernels.gemm_pair import ACTIVATIONS, MOST_HIDDEN, GemmPair
from stof_onnx.kernels.gemm_pair.pair import DTYPES
from stof_onnx.kernels.gemm_pair.reference import reference

from tests.kernels.triton_rows.programs import UNIT, rounded

_ARITHMETIC = 4e-6  # of fp32 sums and functions, relative to the sum of absolute values
_TURNS = 3  # hidden values of one output that round the other way than the exact ones, each by one unit
_SLOPE = 1.13  # the steepest that an activation is


def pairs() -> Iterator[GemmPair]:
    """Usual sizes, sizes that no tile divides, every activation, everything that may be left out."""
    for dtype in DTYPES:
        yield GemmPair(768, 64, 768, dtype, "relu", inner_bias=True, outer_bias=True, residual=True)
        yield GemmPair(768, 128, 768, dtype, "gelu_erf", inner_bias=True, outer_bias=True)
        yield GemmPair(264, MOST_HIDDEN, 136, dtype, residual=True)
        yield GemmPair(8, 8, 8, dtype, inner_bias=True)
        yield GemmPair(104, 24, 1000, dtype, outer_bias=True)
        yield GemmPair(1032, 112, 56, dtype, "silu", "gelu_tanh", residual=True)
    for inner in ACTIVATIONS:
        for outer in ACTIVATIONS:
            yield GemmPair(96, 32, 72, "fp16", inner, outer, True, True, inner == outer)


def random_pair(rng: np.random.Generator) -> GemmPair:
    """Any sizes, activations and parts."""
    depth, hidden, width = (8 * int(rng.integers(1, n + 1)) for n in (100, MOST_HIDDEN // 8, 100))
    inner, outer = (str(rng.choice(ACTIVATIONS)) for _ in range(2))
    flags = (bool(flag) for flag in rng.integers(0, 2, 3))
    return GemmPair(depth, hidden, width, str(rng.choice(DTYPES)), inner, outer, *flags)


def inputs(pair: GemmPair, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs by name, float32 arrays of values that the type can hold; sums have deviations of about 1."""
    found = {}
    for name, shape in pair.shapes(rows).items():
        scale = shape[0] ** -0.5 if name in ("w1", "w2") else 1.0
        found[name] = rounded(scale * rng.standard_normal(shape), pair.dtype)
    return found


def error_ratio(pair: GemmPair, arrays: dict[str, np.ndarray], got: np.ndarray) -> float:
    """The largest error of an output over its bound, infinite where it is no number."""
    exact = reference(pair, arrays)
    if got.shape != exact.shape or not np.isfinite(got).all():
        return float("inf")
    v = {name: np.abs(array.astype(np.float64)) for name, array in arrays.items()}
    hidden = v["x"] @ v["w1"] + v.get("bias1", 0.0)  # no less than any activation of the sum
    unit = UNIT[pair.dtype]
    turned = _TURNS * 2 * unit * np.abs(hidden).max(1, keepdims=True) * v["w2"].max(0) / pair.depth**0.5
    summed = _ARITHMETIC * (hidden @ v["w2"] + v.get("bias2", 0.0) + v.get("residual", 0.0))
    tiny = 2.0**-25 if pair.dtype == "fp16" else 0.0
    bound = 1.01 * unit * np.abs(exact) + _SLOPE**2 * (turned + summed) + tiny
    return float((np.abs(got - exact) / bound).max())
