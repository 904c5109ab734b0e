"""`EncodedMask`: which keys each query may see, as two BSR tile lists and 8x8 bitmaps (docs/mask_format.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stof_onnx.errors import StofError
from stof_onnx.mask.bits import ALL_ONES, INNER, ceil_div, inside_words

FORMAT_VERSION = 1
ONNX_INPUTS = (
    "full_row_ptr",
    "full_col_idx",
    "part_row_ptr",
    "part_col_idx",
    "bitmap",
    "row_order",
    "mask_index",
)
_ADVICE = "Rebuild the mask with stof_onnx.mask.encode; the arrays do not follow docs/mask_format.md"

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class EncodedMask:
    """The distinct masks of one attention, each `allowed[s_q, s_kv]` cut into tiles of tile_m x tile_n.

    Arrays are read-only; equality and hash are those of the content. Elements outside [s_q, s_kv] are neither
    allowed nor forbidden: their bits are 0, and they do not keep a tile from being full.

    Attributes:
        full_row_ptr: int32 [n_masks, rows + 1], absolute into `full_col_idx`; row pointers of the full tiles.
        full_col_idx: int32 [n_full], tile columns, ascending in each row.
        part_row_ptr: int32 [n_masks, rows + 1], absolute into `part_col_idx` and `bitmap`.
        part_col_idx: int32 [n_part].
        bitmap: uint64 [n_part, tile_m/8, tile_n/8]; element (r, c) of an inner tile is bit 8r + c.
        row_order: int32 [n_masks, rows], row tiles by falling work.
        mask_index: int32 [B or 1, H or 1], which mask a batch entry and head use.
        s_q, s_kv: the size of the matrix in elements.
        tile_m, tile_n: the size of a tile in elements, multiples of 8.
    """

    full_row_ptr: I32
    full_col_idx: I32
    part_row_ptr: I32
    part_col_idx: I32
    bitmap: npt.NDArray[np.uint64]
    row_order: I32
    mask_index: I32
    s_q: int
    s_kv: int
    tile_m: int
    tile_n: int

    def __post_init__(self) -> None:
        for name in ONNX_INPUTS:
            array = getattr(self, name)
            if isinstance(array, np.ndarray):
                view = array.view()
                view.flags.writeable = False
                object.__setattr__(self, name, view)

    @property
    def n_masks(self) -> int:
        """Distinct masks stored."""
        return int(self.full_row_ptr.shape[0])

    @property
    def rows(self) -> int:
        """Row tiles of one mask."""
        return ceil_div(self.s_q, self.tile_m)

    @property
    def cols(self) -> int:
        """Column tiles of one mask."""
        return ceil_div(self.s_kv, self.tile_n)

    @property
    def n_full(self) -> int:
        """Full tiles of all masks together."""
        return int(self.full_col_idx.shape[0])

    @property
    def n_part(self) -> int:
        """Part tiles of all masks together."""
        return int(self.part_col_idx.shape[0])

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in ONNX_INPUTS)

    @cached_property
    def digest(self) -> str:
        """Hex digest of the content; equal masks in equal tiles have equal digests, so layers can share arrays."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((FORMAT_VERSION, self.s_q, self.s_kv, self.tile_m, self.tile_n)).encode())
        for name in ONNX_INPUTS:
            array = getattr(self, name)
            digest.update(repr((name, array.shape)).encode())
            digest.update(
                np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
            )
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedMask):
            return NotImplemented
        return self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"EncodedMask({self.s_q}x{self.s_kv} in {self.tile_m}x{self.tile_n}, masks={self.n_masks}, "
            f"full={self.n_full}, part={self.n_part}, mask_index={self.mask_index.shape})"
        )

    def validate(self, where: str = "mask") -> None:
        """Checks every array against the format: types, shapes, bounds, order, bits out of range, tile kinds.

        Args:
            where: the node or file the mask came from, for the message.

        Raises:
            StofError: naming the first array that does not follow the format, and how.
        """
        _Checker(self, where).run()

    def to_onnx_arrays(self) -> dict[str, I32]:
        """The arrays as ONNX stores them: all int32, the bitmap as [..., 2] (low, high) words, none zero-sized."""
        bitmap = np.ascontiguousarray(self.bitmap, dtype="<u8").view("<i4").reshape(*self.bitmap.shape, 2)
        arrays = {name: getattr(self, name) for name in ONNX_INPUTS}
        arrays["bitmap"] = bitmap.astype(np.int32, copy=False)
        return {name: a if a.size else np.zeros((1, *a.shape[1:]), np.int32) for name, a in arrays.items()}

    @classmethod
    def from_onnx_arrays(
        cls,
        arrays: Mapping[str, npt.NDArray[np.generic]],
        s_q: int,
        s_kv: int,
        tile_m: int,
        tile_n: int,
        where: str = "mask",
    ) -> EncodedMask:
        """Reads back what `to_onnx_arrays` wrote, validated: the arrays may come from anywhere.

        Args:
            arrays: the seven int32 arrays by input name.
            s_q, s_kv: the size the mask was encoded at.
            tile_m, tile_n: the node's attributes.
            where: the node or file, for messages.

        Raises:
            StofError: a missing array, or anything `validate` finds.
        """
        missing = [name for name in ONNX_INPUTS if name not in arrays]
        if missing:
            raise StofError(f"mask arrays missing: {', '.join(missing)}", where, _ADVICE)
        read = {name: np.asarray(arrays[name]) for name in ONNX_INPUTS}
        for name, array in read.items():
            if array.dtype != np.int32:
                raise StofError(f"{name} is {array.dtype}, expected int32", where, _ADVICE)
        pairs = read["bitmap"]
        if pairs.ndim != 4 or pairs.shape[-1] != 2:
            raise StofError(
                f"bitmap has shape {list(pairs.shape)}, expected [n_part, tile_m/8, tile_n/8, 2]", where, _ADVICE
            )
        bitmap = np.ascontiguousarray(pairs, dtype="<i4").view("<u8")[..., 0].astype(np.uint64, copy=False)
        full = _without_dummy("full_col_idx", read["full_col_idx"], read["full_row_ptr"], where)
        part = _without_dummy("part_col_idx", read["part_col_idx"], read["part_row_ptr"], where)
        bitmap = _without_dummy("bitmap", bitmap, read["part_row_ptr"], where)
        mask = cls(
            full_row_ptr=read["full_row_ptr"],
            full_col_idx=full,
            part_row_ptr=read["part_row_ptr"],
            part_col_idx=part,
            bitmap=bitmap,
            row_order=read["row_order"],
            mask_index=read["mask_index"],
            s_q=s_q,
            s_kv=s_kv,
            tile_m=tile_m,
            tile_n=tile_n,
        )
        mask.validate(where)
        return mask


def _without_dummy(name: str, entries: npt.NDArray, row_ptr: npt.NDArray, where: str) -> npt.NDArray:
    """Drops the one dummy entry that stands for none; the count is the last row pointer."""
    if row_ptr.size and int(row_ptr.flat[-1]) == 0 and entries.shape[:1] == (1,):
        if entries.any():
            raise StofError(f"the dummy entry of {name} is not zero", where, _ADVICE)
        return entries[:0]
    return entries


class _Checker:
    """The checks of `EncodedMask.validate`, in an order in which each may rely on those before it."""

    def __init__(self, mask: EncodedMask, where: str) -> None:
        self.mask, self.where = mask, where

    def run(self) -> None:
        self._sizes()
        self._types()
        self._shapes()
        for kind in ("full", "part"):
            self._row_pointers(kind)
            self._columns(kind)
        self._disjoint()
        self._bitmap()
        self._row_order()
        self._mask_index()

    def _require(self, ok: bool | np.bool_, what: str) -> None:
        if not ok:
            raise StofError(what, self.where, _ADVICE)

    def _sizes(self) -> None:
        m = self.mask
        for name in ("s_q", "s_kv", "tile_m", "tile_n"):
            value = getattr(m, name)
            self._require(
                isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 < value < 2**31,
                f"{name} is {value!r}, expected a positive int",
            )
        for name in ("tile_m", "tile_n"):
            value = getattr(m, name)
            self._require(value % INNER == 0, f"{name} is {value}, expected a multiple of {INNER}")

    def _types(self) -> None:
        for name in ONNX_INPUTS:
            array = getattr(self.mask, name)
            expected = np.dtype(np.uint64 if name == "bitmap" else np.int32)
            self._require(isinstance(array, np.ndarray), f"{name} is {type(array).__name__}, expected a numpy array")
            self._require(array.dtype == expected, f"{name} is {array.dtype}, expected {expected}")

    def _shapes(self) -> None:
        m = self.mask
        self._require(
            m.full_row_ptr.ndim == 2 and m.full_row_ptr.shape[0] > 0,
            f"full_row_ptr has shape {list(m.full_row_ptr.shape)}, expected [n_masks, rows + 1]",
        )
        n_masks, rows = m.n_masks, m.rows
        for name, shape in (
            ("full_row_ptr", (n_masks, rows + 1)),
            ("part_row_ptr", (n_masks, rows + 1)),
            ("row_order", (n_masks, rows)),
        ):
            found = getattr(m, name).shape
            self._require(found == shape, f"{name} has shape {list(found)}, expected {list(shape)}")
        for name in ("full_col_idx", "part_col_idx"):
            found = getattr(m, name).shape
            self._require(len(found) == 1, f"{name} has shape {list(found)}, expected one axis")
        inner = (m.tile_m // INNER, m.tile_n // INNER)
        expected = (m.n_part, *inner)
        self._require(m.bitmap.shape == expected, f"bitmap has shape {list(m.bitmap.shape)}, expected {list(expected)}")
        self._require(
            m.mask_index.ndim == 2 and m.mask_index.size > 0,
            f"mask_index has shape {list(m.mask_index.shape)}, expected [B or 1, H or 1]",
        )

    def _row_pointers(self, kind: str) -> None:
        ptr = getattr(self.mask, f"{kind}_row_ptr")
        count = getattr(self.mask, f"{kind}_col_idx").shape[0]
        name = f"{kind}_row_ptr"
        self._require(ptr[0, 0] == 0, f"{name} starts at {ptr[0, 0]}, expected 0")
        self._require((ptr[:, 1:] >= ptr[:, :-1]).all(), f"{name} falls inside a mask")
        self._require(
            (ptr[1:, 0] == ptr[:-1, -1]).all(), f"{name} of a mask does not start where the mask before it ends"
        )
        self._require(ptr[-1, -1] == count, f"{name} ends at {ptr[-1, -1]}, but {kind}_col_idx holds {count} entries")

    def _columns(self, kind: str) -> None:
        m, name = self.mask, f"{kind}_col_idx"
        cols = getattr(m, name)
        if not cols.size:
            return
        self._require(
            cols.min() >= 0 and cols.max() < m.cols,
            f"{name} holds {cols.min()}..{cols.max()}, expected 0..{m.cols - 1}",
        )
        keys = _tile_keys(m, kind)
        self._require((keys[1:] > keys[:-1]).all(), f"{name} is not strictly ascending in each row")

    def _disjoint(self) -> None:
        both = np.intersect1d(_tile_keys(self.mask, "full"), _tile_keys(self.mask, "part"), assume_unique=True)
        self._require(not both.size, f"{both.size} tiles are listed both as full and as part")

    def _bitmap(self) -> None:
        m = self.mask
        inner_m, inner_n = m.tile_m // INNER, m.tile_n // INNER
        tile_row = np.repeat(np.tile(np.arange(m.rows), m.n_masks), np.diff(m.part_row_ptr, axis=1).ravel())
        edge = (tile_row == m.rows - 1) & (m.s_q % m.tile_m != 0)
        edge |= (m.part_col_idx == m.cols - 1) & (m.s_kv % m.tile_n != 0)
        step = max(1, (1 << 20) // (inner_m * inner_n))
        for start in range(0, m.n_part, step):
            chunk = slice(start, start + step)
            bits, on_edge = m.bitmap[chunk], edge[chunk]
            some = np.bitwise_or.reduce(bits, axis=(1, 2)) != 0
            every = np.bitwise_and.reduce(bits, axis=(1, 2)) == ALL_ONES
            for i in np.flatnonzero(on_edge):
                inside = inside_words(
                    tile_row[start + i] * inner_m + np.arange(inner_m),
                    m.part_col_idx[start + i] * inner_n + np.arange(inner_n),
                    m.s_q,
                    m.s_kv,
                )
                self._require(
                    not (bits[i] & ~inside).any(), f"part tile {start + i} has bits outside {m.s_q} x {m.s_kv} set"
                )
                every[i] = (bits[i] == inside).all()
            for flags, kind in ((~some, "empty"), (every, "full")):
                self._require(not flags.any(), f"part tile {start + int(np.argmax(flags))} is {kind}")

    def _row_order(self) -> None:
        m = self.mask
        sorted_rows = np.sort(m.row_order, axis=1)
        self._require(
            (sorted_rows == np.arange(m.rows)).all(), f"row_order is not a permutation of 0..{m.rows - 1} in each mask"
        )

    def _mask_index(self) -> None:
        low, high = int(self.mask.mask_index.min()), int(self.mask.mask_index.max())
        self._require(
            low >= 0 and high < self.mask.n_masks,
            f"mask_index holds {low}..{high}, expected 0..{self.mask.n_masks - 1}",
        )


def _tile_keys(mask: EncodedMask, kind: str) -> npt.NDArray[np.int64]:
    """One number a listed tile, (mask, row, column) in lexicographic order."""
    counts = np.diff(getattr(mask, f"{kind}_row_ptr"), axis=1).ravel()
    rows = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    return rows * mask.cols + getattr(mask, f"{kind}_col_idx")
