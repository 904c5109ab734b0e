"""Regions of two GEMMs as what is compiled ahead for them."""

from __future__ import annotations

from collections.abc import Mapping

from stof_onnx.kernels.gemm_pair import GemmPair


def pair_of(attributes: Mapping[str, object], depth: int, width: int, dtype: str) -> GemmPair:
    """The pair of a region that `gemm_pair` has recognised.

    Args:
        attributes: of its node.
        depth, width: columns of its input and its output.
        dtype: of all tensors, whatever the model's own is.

    Raises:
        StofError: no kernel computes it.
    """
    inner_bias, outer_bias, residual = (bool(attributes[n]) for n in ("inner_bias", "outer_bias", "has_residual"))
    inner, outer = (str(attributes[name]) for name in ("inner", "outer"))
    hidden = int(str(attributes["hidden"]))
    return GemmPair(depth, hidden, width, dtype, inner, outer, inner_bias, outer_bias, residual)
