"""Exact figures of a mask, for reports, kernel choice and launch attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stof_onnx.mask.bits import INNER, Ints, count_bits_per_row
from stof_onnx.mask.decode import listed
from stof_onnx.mask.encoded import EncodedMask

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class KeysPerRow:
    """How many keys a query sees, over the queries of a mask: extremes, quartiles (lower of two), exact mean."""

    min: int
    quartile1: int
    median: int
    quartile3: int
    max: int
    mean: float


@dataclass(frozen=True)
class OneMaskStats:
    """Figures of one distinct mask.

    Attributes:
        allowed: allowed elements.
        full, part, empty: tiles of each kind.
        max_row_tiles: the longest list (full + part) of any row tile.
        rows_without_keys: queries that see no key.
        keys_per_row: distribution of the keys a query sees.
        part_allowed: allowed elements inside part tiles.
    """

    allowed: int
    full: int
    part: int
    empty: int
    max_row_tiles: int
    rows_without_keys: int
    keys_per_row: KeysPerRow
    part_allowed: int


@dataclass(frozen=True)
class MaskStats:
    """Figures of an attention's masks; counts of tiles and elements are means over the entries of `mask_index`.

    Attributes:
        s_q, s_kv, tile_m, tile_n: as in the mask.
        per_mask: the distinct masks.
        uses: how many entries of `mask_index` name each distinct mask.
    """

    s_q: int
    s_kv: int
    tile_m: int
    tile_n: int
    per_mask: tuple[OneMaskStats, ...]
    uses: tuple[int, ...]

    @property
    def density(self) -> float:
        """Allowed elements over all elements, as the heads and batch entries use the masks."""
        return self._mean("allowed") / (self.s_q * self.s_kv)

    @property
    def full(self) -> float:
        """Full tiles a head."""
        return self._mean("full")

    @property
    def part(self) -> float:
        """Part tiles a head."""
        return self._mean("part")

    @property
    def empty(self) -> float:
        """Empty tiles a head."""
        return self._mean("empty")

    @property
    def max_row_tiles(self) -> int:
        """The longest tile list of any row of any mask."""
        return max(one.max_row_tiles for one in self.per_mask)

    @property
    def rows_without_keys(self) -> int:
        """Queries that see no key in at least one head: the largest count of any mask."""
        return max(one.rows_without_keys for one in self.per_mask)

    def _mean(self, figure: str) -> float:
        total = sum(getattr(one, figure) * uses for one, uses in zip(self.per_mask, self.uses, strict=True))
        return total / sum(self.uses)


def statistics(mask: EncodedMask) -> MaskStats:
    """Exact figures of every distinct mask (one pass over the bitmaps)."""
    uses = np.bincount(mask.mask_index.ravel(), minlength=mask.n_masks)
    return MaskStats(
        mask.s_q,
        mask.s_kv,
        mask.tile_m,
        mask.tile_n,
        tuple(_one(mask, number) for number in range(mask.n_masks)),
        tuple(int(n) for n in uses),
    )


def keys_per_row(mask: EncodedMask, number: int = 0) -> I64:
    """How many keys each query of one distinct mask sees: int64 [S_q]."""
    keys = np.zeros((mask.rows, mask.tile_m), np.int64)
    row, _, _, width = _full_sizes(mask, number)
    full_keys = np.zeros(mask.rows, np.int64)
    np.add.at(full_keys, row, width)
    keys += full_keys[:, None]
    for row, _, counts in _part_counts(mask, number):
        np.add.at(keys, row, counts)
    return keys.reshape(-1)[: mask.s_q]


def rows_without_keys(mask: EncodedMask, number: int = 0) -> I64:
    """The queries of one distinct mask that see no key, ascending."""
    return np.flatnonzero(keys_per_row(mask, number) == 0)


def tile_allowed(mask: EncodedMask, number: int = 0) -> I64:
    """Allowed elements in each tile of one distinct mask: int64 [rows, cols]."""
    allowed = np.zeros((mask.rows, mask.cols), np.int64)
    row, col, height, width = _full_sizes(mask, number)
    allowed[row, col] = height * width
    for row, col, counts in _part_counts(mask, number):
        allowed[row, col] = counts.sum(axis=1)
    return allowed


def row_tiles(mask: EncodedMask) -> I64:
    """Listed tiles (full + part) of every row tile: int64 [n_masks, rows]."""
    ends = mask.full_row_ptr.astype(np.int64) + mask.part_row_ptr
    return ends[:, 1:] - ends[:, :-1]


def _full_sizes(mask: EncodedMask, number: int) -> tuple[Ints, Ints, I64, I64]:
    """Rows and columns of the full tiles, and how many of their elements lie in range along each axis."""
    row, col, _ = listed(mask, "full", number, 0, mask.rows)
    height = np.minimum(mask.s_q - row.astype(np.int64) * mask.tile_m, mask.tile_m)
    width = np.minimum(mask.s_kv - col.astype(np.int64) * mask.tile_n, mask.tile_n)
    return row, col, height, width


def _part_counts(mask: EncodedMask, number: int) -> Iterator[tuple[Ints, Ints, I64]]:
    """Part tiles in chunks: their rows, columns, and allowed elements in each of their tile_m rows."""
    row, col, entries = listed(mask, "part", number, 0, mask.rows)
    step = max(1, (1 << 20) // (mask.tile_m // INNER * (mask.tile_n // INNER)))
    for start in range(0, len(row), step):
        chunk = slice(start, start + step)
        bits = mask.bitmap[entries][chunk]
        counts = count_bits_per_row(bits).sum(axis=2, dtype=np.int64)
        yield row[chunk], col[chunk], counts.reshape(len(bits), mask.tile_m)


def _one(mask: EncodedMask, number: int) -> OneMaskStats:
    full = int(mask.full_row_ptr[number, -1] - mask.full_row_ptr[number, 0])
    part = int(mask.part_row_ptr[number, -1] - mask.part_row_ptr[number, 0])
    keys = keys_per_row(mask, number)
    allowed = int(keys.sum())
    _, _, height, width = _full_sizes(mask, number)
    lowest, q1, median, q3, highest = (int(x) for x in np.quantile(keys, (0, 0.25, 0.5, 0.75, 1), method="lower"))
    return OneMaskStats(
        allowed=allowed,
        full=full,
        part=part,
        empty=mask.rows * mask.cols - full - part,
        max_row_tiles=int(row_tiles(mask)[number].max()),
        rows_without_keys=int((keys == 0).sum()),
        keys_per_row=KeysPerRow(lowest, q1, median, q3, highest, allowed / mask.s_q),
        part_allowed=allowed - int((height * width).sum()),
    )
