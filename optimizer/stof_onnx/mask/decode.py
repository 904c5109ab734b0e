"""`EncodedMask` back to booleans, whole or by row bands."""

from __future__ import annotations

import numpy as np

from stof_onnx.errors import StofError
from stof_onnx.mask.bits import ALL_ONES, INNER, U64, Ints, bytes_from_words, ceil_div, inside_words
from stof_onnx.mask.encode import Bools, bands
from stof_onnx.mask.encoded import EncodedMask


def decode(mask: EncodedMask) -> Bools:
    """The dense mask, bool [B or 1, H or 1, S_q, S_kv] (as `mask_index` broadcasts)."""
    distinct = np.stack([decode_one(mask, number) for number in range(mask.n_masks)])
    if mask.n_masks == 1:
        return np.broadcast_to(distinct, (*mask.mask_index.shape, mask.s_q, mask.s_kv))
    return distinct[mask.mask_index]


def decode_one(mask: EncodedMask, number: int = 0) -> Bools:
    """One distinct mask as bool [S_q, S_kv]."""
    out = np.empty((mask.s_q, mask.s_kv), np.bool_)
    for q0, q1 in bands(mask.s_q, mask.s_kv, mask.tile_m):
        out[q0:q1] = decode_band(mask, q0, q1, number)
    return out


def decode_band(mask: EncodedMask, q0: int, q1: int, number: int = 0) -> Bools:
    """Rows q0..q1-1 of one distinct mask, bool [q1 - q0, S_kv]; any rows, and only they are unpacked.

    Raises:
        StofError: rows or a mask number that do not exist.
    """
    if not (0 <= q0 < q1 <= mask.s_q and 0 <= number < mask.n_masks):
        raise StofError(
            f"no rows {q0}..{q1} of mask {number}", "mask", f"It has {mask.s_q} rows and {mask.n_masks} distinct masks"
        )
    first = q0 // mask.tile_m
    words = tile_words(mask, number, first, ceil_div(q1, mask.tile_m), np.arange(mask.cols))
    offset = first * mask.tile_m
    rows = bytes_from_words(words)[q0 - offset : q1 - offset]
    return np.unpackbits(rows, axis=1, count=mask.s_kv, bitorder="little").view(np.bool_)


def tile_words(mask: EncodedMask, number: int, row0: int, row1: int, cols: Ints) -> U64:
    """The inner tiles of row tiles row0..row1-1 at the tile columns `cols` (ascending).

    `cols` must hold every column that is listed in those rows and may hold others, also past the last one.

    Returns:
        uint64 [(row1 - row0) * tile_m/8, len(cols) * tile_n/8]; bits outside [s_q, s_kv] are 0.
    """
    inner_m, inner_n = mask.tile_m // INNER, mask.tile_n // INNER
    tiles = np.zeros((row1 - row0, inner_m, len(cols), inner_n), np.uint64)
    by_tile = tiles.transpose(0, 2, 1, 3)
    row, col, _ = listed(mask, "full", number, row0, row1)
    by_tile[row, np.searchsorted(cols, col)] = ALL_ONES
    row, col, entries = listed(mask, "part", number, row0, row1)
    by_tile[row, np.searchsorted(cols, col)] = mask.bitmap[entries]
    words: U64 = tiles.reshape((row1 - row0) * inner_m, len(cols) * inner_n)
    if row1 * mask.tile_m > mask.s_q or (len(cols) and (int(cols[-1]) + 1) * mask.tile_n > mask.s_kv):
        inner_rows = np.arange(row0 * inner_m, row1 * inner_m)
        inner_cols = (np.asarray(cols)[:, None] * inner_n + np.arange(inner_n)).ravel()
        words &= inside_words(inner_rows, inner_cols, mask.s_q, mask.s_kv)
    return words


def listed(mask: EncodedMask, kind: str, number: int, row0: int, row1: int) -> tuple[Ints, Ints, slice]:
    """The tiles listed as `kind` ("full" or "part") in row tiles row0..row1-1 of one mask.

    Returns:
        their rows (counted from row0), their columns, and where they are in the index array.
    """
    ptr = getattr(mask, f"{kind}_row_ptr")[number, row0 : row1 + 1]
    entries = slice(int(ptr[0]), int(ptr[-1]))
    rows = np.repeat(np.arange(row1 - row0), np.diff(ptr))
    return rows, getattr(mask, f"{kind}_col_idx")[entries], entries
