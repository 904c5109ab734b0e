"""The rule of the STOF paper (arXiv 2506.06095, Eq. 1) between row-wise and block-wise kernels, for comparison only."""

from __future__ import annotations

import math

import numpy as np

from stof_onnx.mask import EncodedMask, retile
from stof_onnx.mask.statistics import row_tiles

TILE = 16
TAU = 1.2


def eq1(loaded: float, n: int) -> float:
    """load_row_ptr[n] / n^2 - tau / (log2 n)^2; the row-wise kernel runs where it is negative.

    Args:
        loaded: 16 x 16 tiles that are not empty.
        n: row tiles, ceil(S / 16). With one the second term has no bound: minus infinity.
    """
    if n <= 1:
        return -math.inf
    return loaded / n**2 - TAU / math.log2(n) ** 2


def row_wise_by_eq1(mask: EncodedMask) -> bool:
    """What the rule says of a mask (in any tiles); the mean over the entries of `mask_index` where masks differ."""
    tiled = retile(mask, TILE, TILE)
    loaded = row_tiles(tiled).sum(axis=1)
    return eq1(float(np.mean(loaded[tiled.mask_index])), tiled.rows) < 0
