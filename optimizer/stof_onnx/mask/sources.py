"""Row-band sources (see `encode_bands`) of masks that are one run of keys a row: cheap even at 131072 x 131072."""

from __future__ import annotations

import numpy as np

from stof_onnx.mask.bits import Ints
from stof_onnx.mask.encode import Bools, RowBands


def key_runs(start: Ints, stop: Ints, s_kv: int) -> RowBands:
    """Query q sees keys start[q] <= k < stop[q] (clipped to 0..s_kv); start and stop are integers [S_q]."""
    first = np.clip(start, 0, s_kv).tolist()
    last = np.clip(stop, 0, s_kv).tolist()

    def band(q0: int, q1: int) -> Bools:
        rows = np.zeros((q1 - q0, s_kv), np.bool_)
        for row, lo, hi in zip(rows, first[q0:q1], last[q0:q1], strict=True):
            row[lo:hi] = True
        return rows

    return band


def all_keys(s_q: int, s_kv: int) -> RowBands:
    """Every query sees every key."""
    return key_runs(np.zeros(s_q, np.int64), np.full(s_q, s_kv), s_kv)


def causal(s_q: int, s_kv: int, bottom_right: bool = False) -> RowBands:
    """k <= q, or with `bottom_right` k <= q + s_kv - s_q: the last query sees the last key."""
    shift = s_kv - s_q if bottom_right else 0
    return key_runs(np.zeros(s_q, np.int64), np.arange(s_q) + shift + 1, s_kv)


def window(s_q: int, s_kv: int, left: int, right: int) -> RowBands:
    """q - left <= k <= q + right; a causal sliding window has right = 0."""
    q = np.arange(s_q)
    return key_runs(q - left, q + right + 1, s_kv)
