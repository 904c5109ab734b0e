"""Rows of booleans <-> 8x8 inner tiles of one uint64 each: element (r, c) of an inner tile is bit 8r + c."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.integer]

INNER = 8
ALL_ONES = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

# Bits of an inner tile whose first n rows (columns) lie inside the matrix, n = 0..8.
_ROWS_INSIDE = np.array([(1 << (8 * n)) - 1 for n in range(9)], dtype=np.uint64)
_COLS_INSIDE = np.array([((1 << n) - 1) * 0x0101_0101_0101_0101 for n in range(9)], dtype=np.uint64)
_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def words_from_bytes(rows: U8) -> U64:
    """Bit-packed rows [8*n, c] (bit j of byte i is column 8i + j) as inner tiles [n, c]."""
    n, c = rows.shape[0] // INNER, rows.shape[1]
    columns_first = np.ascontiguousarray(rows.reshape(n, INNER, c).transpose(0, 2, 1))
    return columns_first.view("<u8")[..., 0].astype(np.uint64, copy=False)


def bytes_from_words(words: U64) -> U8:
    """The inverse of `words_from_bytes`: [n, c] uint64 to [8*n, c] uint8."""
    n, c = words.shape
    as_bytes = np.ascontiguousarray(words, dtype="<u8").view(np.uint8).reshape(n, c, INNER)
    return np.ascontiguousarray(as_bytes.transpose(0, 2, 1)).reshape(n * INNER, c)


def inside_words(inner_rows: Ints, inner_cols: Ints, s_q: int, s_kv: int) -> U64:
    """Which bits of the inner tiles at these inner row and column numbers lie inside [s_q, s_kv]: [rows, cols]."""
    rows = _ROWS_INSIDE[np.clip(s_q - INNER * inner_rows.astype(np.int64), 0, INNER)]
    cols = _COLS_INSIDE[np.clip(s_kv - INNER * inner_cols.astype(np.int64), 0, INNER)]
    return rows[:, None] & cols[None, :]


def count_bits_per_row(words: U64) -> U8:
    """Set bits in each of the 8 rows of each inner tile: [...] uint64 to [..., 8] uint8."""
    as_bytes = np.ascontiguousarray(words, dtype="<u8").view(np.uint8)
    return _POPCOUNT[as_bytes].reshape(*words.shape, INNER)
