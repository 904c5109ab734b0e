"""Causal masks and windows that an operator holds as attributes."""

from __future__ import annotations

import numpy as np
from stof_onnx.mask import EncodedMask, encode_bands
from stof_onnx.mask.sources import key_runs


def encode_window(seq_q: int, seq_kv: int, left: int, right: int) -> EncodedMask:
    """q - left <= k <= q + right, aligned at the upper left; -1 is no bound on that side."""
    start, stop = window_runs(seq_q, seq_kv, left, right)
    return encode_bands(key_runs(start, stop, seq_kv), seq_q, seq_kv)


def window_runs(seq_q: int, seq_kv: int, left: int, right: int) -> tuple[np.ndarray, np.ndarray]:
    """First key and key after the last of each query of that window."""
    query = np.arange(seq_q)
    start = np.zeros_like(query) if left < 0 else query - left
    stop = np.full_like(query, seq_kv) if right < 0 else query + right + 1
    return start, stop
