"""Stores a bias as small as it can be: one value for each k - q and head where it depends on nothing else."""

from __future__ import annotations

import numpy as np
from stof_onnx.attention.types import BiasKind, BiasTerm


def bias_term(bias: np.ndarray, allowed: np.ndarray) -> BiasTerm:
    """The bias term of `bias` [B or 1, H or 1, Sq, Skv]; entries that are not `allowed` do not matter.

    `relative` only where every allowed entry equals its vector's entry exactly.
    """
    if not bias.any():
        return BiasTerm(BiasKind.NONE)
    if bias.shape[0] == 1:
        seen: np.ndarray = np.logical_or.reduce(allowed, axis=0)
        vectors = []
        for h in range(bias.shape[1]):
            visible = np.asarray(seen[h] if seen.shape[0] == bias.shape[1] else seen.any(axis=0))
            vector = _relative(bias[0, h], visible)
            if vector is None:
                vector = _linear(bias[0, h], visible)
            if vector is None:
                return BiasTerm(BiasKind.DENSE, bias)
            vectors.append(vector)
        return BiasTerm(BiasKind.RELATIVE, np.stack(vectors), rel_rq=bias.shape[2])
    return BiasTerm(BiasKind.DENSE, bias)


def _relative(bias: np.ndarray, allowed: np.ndarray) -> np.ndarray | None:
    """[Sq + Skv - 1] with entry k - q + Sq - 1, or None."""
    s_q, s_kv = bias.shape
    vector = np.zeros(s_q + s_kv - 1, bias.dtype)
    known = np.zeros(vector.shape, bool)
    # A diagonal's value is that of any allowed entry on it; the first column and row usually have one.
    for values, seen, start in (
        (bias[::-1, 0], allowed[::-1, 0], 0),
        (bias[0, :], allowed[0, :], s_q - 1),
        (bias[::-1, -1], allowed[::-1, -1], s_kv - 1),
        (bias[-1, :], allowed[-1, :], 0),
    ):
        part = slice(start, start + len(values))
        vector[part] = np.where(seen, values, vector[part])
        known[part] |= seen
    for d in np.flatnonzero(~known):
        offset = int(d) - (s_q - 1)
        seen = np.diagonal(allowed, offset)
        if seen.any():
            vector[d] = np.diagonal(bias, offset)[int(np.argmax(seen))]
    toeplitz = np.lib.stride_tricks.sliding_window_view(vector, s_kv)[::-1]
    return vector if bool(((toeplitz == bias) | ~allowed).all()) else None


def _linear(bias: np.ndarray, allowed: np.ndarray) -> np.ndarray | None:
    """The vector of a bias slope * k (ALiBi without the query): a constant a row does not change its softmax.

    Only where slope * k is what the bias holds up to its own rounding.
    """
    s_q, s_kv = bias.shape
    if s_kv < 2 or not allowed.any(axis=1).all() or not allowed.any(axis=0).all():
        return None
    column = np.take_along_axis(bias, np.argmax(allowed, axis=0)[None], axis=0)[0]
    if not ((bias == column) | ~allowed).all():
        return None
    exact = column.astype(np.float64)
    slope = (exact[-1] - exact[0]) / (s_kv - 1)
    unit = float(np.spacing(np.abs(column).max())) if column.dtype.kind == "f" else 0.0
    if np.abs(exact[0] + slope * np.arange(s_kv) - exact).max() > unit:
        return None
    return (slope * np.arange(1 - s_q, s_kv)).astype(np.float32)
