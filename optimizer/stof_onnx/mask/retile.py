"""The same mask in other tiles, or cut to its leading submatrix, without ever being dense."""

from __future__ import annotations

import math

import numpy as np

from stof_onnx.errors import StofError
from stof_onnx.mask.bits import INNER, U64, ceil_div, inside_words
from stof_onnx.mask.decode import listed, tile_words
from stof_onnx.mask.encode import bands
from stof_onnx.mask.encoded import EncodedMask
from stof_onnx.mask.tiles import TileLists, TileSorter, assemble


def retile(mask: EncodedMask, tile_m: int, tile_n: int) -> EncodedMask:
    """The mask in tiles of tile_m x tile_n (multiples of 8, finer or coarser): what `encode` would give for them.

    Only column groups that hold a tile are unpacked, band by band.

    Raises:
        StofError: a tile size that is not a multiple of 8.
    """
    if (tile_m, tile_n) == (mask.tile_m, mask.tile_n):
        return mask
    return _rebuild(mask, mask.s_q, mask.s_kv, tile_m, tile_n)


def leading_submatrix(mask: EncodedMask, s_q: int, s_kv: int) -> EncodedMask:
    """The first s_q queries and s_kv keys of every mask, in the same tiles.

    Raises:
        StofError: a size that is zero or larger than the mask's.
    """
    if not (0 < s_q <= mask.s_q and 0 < s_kv <= mask.s_kv):
        raise StofError(
            f"{s_q} x {s_kv} is not inside the mask of {mask.s_q} x {mask.s_kv}", "mask", "Ask for a smaller part"
        )
    if (s_q, s_kv) == (mask.s_q, mask.s_kv):
        return mask
    return _rebuild(mask, s_q, s_kv, mask.tile_m, mask.tile_n)


def _rebuild(mask: EncodedMask, s_q: int, s_kv: int, tile_m: int, tile_n: int) -> EncodedMask:
    lists = [_sort_again(mask, number, s_q, s_kv, tile_m, tile_n) for number in range(mask.n_masks)]
    return assemble(lists, mask.mask_index, s_q, s_kv, tile_m, tile_n)


def _sort_again(mask: EncodedMask, number: int, s_q: int, s_kv: int, tile_m: int, tile_n: int) -> TileLists:
    sorter = TileSorter(s_q, s_kv, tile_m, tile_n)
    group = math.lcm(mask.tile_n, tile_n)  # columns of both tilings begin together at multiples of it
    for q0, q1 in bands(s_q, s_kv, math.lcm(mask.tile_m, tile_m)):
        row0, row1 = q0 // mask.tile_m, ceil_div(q1, mask.tile_m)
        touched = np.concatenate([listed(mask, kind, number, row0, row1)[1] for kind in ("full", "part")])
        groups = np.unique(touched // (group // mask.tile_n))
        words = tile_words(mask, number, row0, row1, _columns(groups, group // mask.tile_n))
        words = _with_height(words, ceil_div(q1 - q0, tile_m) * tile_m // INNER)
        if (s_q, s_kv) != (mask.s_q, mask.s_kv):
            inner_rows = q0 // INNER + np.arange(words.shape[0])
            words &= inside_words(inner_rows, _columns(groups, group // INNER), s_q, s_kv)
        sorter.add(words, _columns(groups, group // tile_n))
    return sorter.finish()


def _columns(groups: np.ndarray, per_group: int) -> np.ndarray:
    """The columns, `per_group` to a group, of the given groups of columns."""
    return (groups[:, None].astype(np.int64) * per_group + np.arange(per_group)).ravel()


def _with_height(words: U64, height: int) -> U64:
    """The first `height` inner rows; rows that are not there hold nothing."""
    if words.shape[0] >= height:
        return words[:height]
    return np.concatenate([words, np.zeros((height - words.shape[0], words.shape[1]), np.uint64)])
