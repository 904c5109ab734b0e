"""What a pair of products means, in float64: the judge of its kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stof_onnx.kernels.gemm_pair.pair import GemmPair
from stof_onnx.kernels.triton_rows.ir import RowBuilder
from stof_onnx.kernels.triton_rows.library import ACTIVATIONS
from stof_onnx.kernels.triton_rows.reference import reference as rows_reference
from stof_onnx.kernels.triton_rows.reference import round_bf16


def reference(pair: GemmPair, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output [rows, width] in float64, not rounded; the hidden rows are rounded to the pair's type.

    Args:
        arrays: the inputs by name.
    """
    v = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    hidden = activate(pair.inner, v["x"] @ v["w1"] + v.get("bias1", 0.0))
    rounded = round_bf16(hidden) if pair.dtype == "bf16" else hidden.astype(np.float16)
    out = activate(pair.outer, rounded.astype(np.float64) @ v["w2"] + v.get("bias2", 0.0))
    return out + v.get("residual", 0.0)


def activate(name: str, x: np.ndarray) -> np.ndarray:
    """An activation of a matrix, in float64."""
    if name == "none":
        return x
    b = RowBuilder(x.shape[1])
    b.output(ACTIVATIONS[name](b, b.rows("fp32")), "fp32")
    return rows_reference(b.build(), [x])[0]
