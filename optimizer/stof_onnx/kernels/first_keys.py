"""How often an online softmax meets queries that saw no key yet: each time their running maximum has to be raised."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stof_onnx.mask import EncodedMask
from stof_onnx.mask.bits import INNER, count_bits_per_row

_WARP_ROWS = 16
_NEVER = np.iinfo(np.int64).max


def first_key_tiles(mask: EncodedMask) -> npt.NDArray[np.float64]:
    """Tiles of each row tile's list in which a warp's queries see their first keys, a mean over warps: [n_masks, rows].

    Full tiles come first in a list, and one of them shows every query a key: 1 where there is any.
    """
    found = np.zeros((mask.n_masks, mask.rows))
    for number in range(mask.n_masks):
        pointers = mask.part_row_ptr[number].astype(np.int64)
        tile, query = np.nonzero(_queries_with_keys(mask.bitmap[pointers[0] : pointers[-1]], mask.tile_m))
        row = np.repeat(np.arange(mask.rows), np.diff(pointers))[tile]
        first = np.full((mask.rows, mask.tile_m), _NEVER, np.int64)
        np.minimum.at(first, (row, query), tile)
        warps = np.sort(first.reshape(mask.rows, -1, _WARP_ROWS), axis=2)
        new = np.diff(warps, axis=2, prepend=-1) > 0
        found[number] = (new & (warps < _NEVER)).sum(axis=2).mean(axis=1)
    return np.where(np.diff(mask.full_row_ptr, axis=1) > 0, 1.0, found)


def _queries_with_keys(bitmap: npt.NDArray[np.uint64], rows: int) -> npt.NDArray[np.bool_]:
    """Which queries of each tile see a key in it: [tiles, rows]."""
    step = max(1, (1 << 20) // (rows // INNER * bitmap.shape[2]))
    some = [
        (count_bits_per_row(bitmap[i : i + step]) > 0).any(axis=2).reshape(-1, rows)
        for i in range(0, len(bitmap), step)
    ]
    return np.concatenate(some) if some else np.zeros((0, rows), np.bool_)
