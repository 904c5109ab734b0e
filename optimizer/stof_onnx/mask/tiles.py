"""Sorting tiles into empty, full and part, and putting the lists of several masks together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stof_onnx.errors import StofError
from stof_onnx.mask.bits import ALL_ONES, INNER, U64, Ints, ceil_div, inside_words
from stof_onnx.mask.encoded import I32, EncodedMask


@dataclass(frozen=True)
class TileLists:
    """The tile lists of one mask: entries a row ([rows] int64), columns, and the bitmaps of the part tiles."""

    full_counts: npt.NDArray[np.int64]
    full_cols: I32
    part_counts: npt.NDArray[np.int64]
    part_cols: I32
    bitmap: U64

    def digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.full_counts, self.full_cols, self.part_counts, self.part_cols, self.bitmap):
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.digest()


class TileSorter:
    """Builds the `TileLists` of one mask from the inner tiles of consecutive row bands."""

    def __init__(self, s_q: int, s_kv: int, tile_m: int, tile_n: int) -> None:
        for name, size in (("s_q", s_q), ("s_kv", s_kv)):
            if not 0 < size < 2**31:
                raise StofError(f"a mask of {s_q} x {s_kv} has no elements", name, "Give a size of at least 1 x 1")
        for name, size in (("tile_m", tile_m), ("tile_n", tile_n)):
            if size <= 0 or size % INNER:
                raise StofError(f"{size} is not a tile size", name, f"Give a positive multiple of {INNER}")
        self.s_q, self.s_kv, self.tile_m, self.tile_n = s_q, s_kv, tile_m, tile_n
        self.rows, self.cols = ceil_div(s_q, tile_m), ceil_div(s_kv, tile_n)
        self._next_row = 0
        self._full_counts: list[npt.NDArray[np.int64]] = []
        self._part_counts: list[npt.NDArray[np.int64]] = []
        self._full_cols: list[I32] = []
        self._part_cols: list[I32] = []
        self._bitmaps: list[U64] = []

    def add(self, words: U64, cols: Ints) -> None:
        """Takes the next row tiles.

        Args:
            words: inner tiles uint64 [n_rows * tile_m/8, len(cols) * tile_n/8]; bits outside [s_q, s_kv] are 0.
            cols: the tile columns given, ascending; the others hold nothing.
        """
        inner_m, inner_n = self.tile_m // INNER, self.tile_n // INNER
        n_rows = words.shape[0] // inner_m
        tiles = words.reshape(n_rows, inner_m, len(cols), inner_n)
        some = np.bitwise_or.reduce(tiles, axis=(1, 3)) != 0
        end_row = self._next_row + n_rows
        if end_row * self.tile_m > self.s_q or (len(cols) and (int(cols[-1]) + 1) * self.tile_n > self.s_kv):
            inner_rows = self._next_row * inner_m + np.arange(n_rows * inner_m)
            inner_cols = (np.asarray(cols)[:, None] * inner_n + np.arange(inner_n)).ravel()
            outside = ~inside_words(inner_rows, inner_cols, self.s_q, self.s_kv)
            every = np.bitwise_and.reduce(tiles | outside.reshape(tiles.shape), axis=(1, 3)) == ALL_ONES
        else:
            every = np.bitwise_and.reduce(tiles, axis=(1, 3)) == ALL_ONES
        full = some & every
        part = some & ~every
        narrow = np.asarray(cols, dtype=np.int32)
        self._full_counts.append(full.sum(axis=1))
        self._full_cols.append(narrow[np.nonzero(full)[1]])
        part_row, part_col = np.nonzero(part)
        self._part_counts.append(part.sum(axis=1))
        self._part_cols.append(narrow[part_col])
        self._bitmaps.append(tiles.transpose(0, 2, 1, 3)[part_row, part_col])
        self._next_row = end_row

    def finish(self) -> TileLists:
        assert self._next_row == self.rows, f"{self._next_row} of {self.rows} row tiles were added"
        return TileLists(
            np.concatenate(self._full_counts),
            np.concatenate(self._full_cols),
            np.concatenate(self._part_counts),
            np.concatenate(self._part_cols),
            self._bitmaps[0] if len(self._bitmaps) == 1 else np.concatenate(self._bitmaps),
        )


def assemble(
    lists: Sequence[TileLists], mask_index: Ints, s_q: int, s_kv: int, tile_m: int, tile_n: int
) -> EncodedMask:
    """One `EncodedMask` in canonical form: equal masks once, in order of first use, broadcast axes of the index as 1.

    Args:
        lists: the masks' tile lists.
        mask_index: [B or 1, H or 1], an entry of `lists` each; entries of `lists` it does not name are dropped.
    """
    used, compact = _distinct(lists, mask_index)
    full_counts = np.stack([entry.full_counts for entry in used])
    part_counts = np.stack([entry.part_counts for entry in used])
    return EncodedMask(
        full_row_ptr=_row_ptr(full_counts),
        full_col_idx=_join([entry.full_cols for entry in used]),
        part_row_ptr=_row_ptr(part_counts),
        part_col_idx=_join([entry.part_cols for entry in used]),
        bitmap=_join([entry.bitmap for entry in used]),
        row_order=order_by_work(full_counts + part_counts),
        mask_index=compact,
        s_q=s_q,
        s_kv=s_kv,
        tile_m=tile_m,
        tile_n=tile_n,
    )


def order_by_work(work: npt.NDArray) -> I32:
    """Row tiles by falling work, ties by ascending row: [n_masks, rows] to int32 [n_masks, rows]."""
    return np.argsort(-work, axis=1, kind="stable").astype(np.int32)


def _distinct(lists: Sequence[TileLists], mask_index: Ints) -> tuple[list[TileLists], I32]:
    index = np.asarray(mask_index)
    position: dict[bytes, int] = {}
    used: list[TileLists] = []
    new_number: dict[int, int] = {}
    for old in dict.fromkeys(index.ravel().tolist()):
        key = lists[old].digest() if len(lists) > 1 else b""
        if key not in position:
            position[key] = len(used)
            used.append(lists[old])
        new_number[old] = position[key]
    compact = np.array([new_number[old] for old in index.ravel().tolist()], dtype=np.int32).reshape(index.shape)
    for axis in (0, 1):
        first = compact.take([0], axis=axis)
        if (compact == first).all():
            compact = first
    return used, compact


def _row_ptr(counts: npt.NDArray[np.int64]) -> I32:
    ends = np.cumsum(counts.ravel())
    if ends[-1] >= 2**31:
        raise StofError(f"the mask has {ends[-1]} tiles, more than an int32 index can name", "mask", "Use larger tiles")
    ends = ends.reshape(counts.shape)
    starts = np.concatenate([[0], ends[:-1, -1]])
    return np.concatenate([starts[:, None], ends], axis=1).astype(np.int32)


def _join(arrays: list[npt.NDArray]) -> npt.NDArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
