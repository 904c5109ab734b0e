"""Decoding the mask arrays (docs/mask_format.md) into a dense boolean mask, in standard operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from stof_onnx.attention.functions.builder import FunctionBuilder
from stof_onnx.mask import EncodedMask

DECODE_INPUTS = ("full_row_ptr", "full_col_idx", "part_row_ptr", "part_col_idx", "bitmap", "mask_index")


@dataclass(frozen=True)
class Geometry:
    """The sizes of an encoded mask that its decoding needs as constants."""

    s_q: int
    s_kv: int
    tile_m: int
    tile_n: int
    n_masks: int
    indexed: bool  # mask_index picks masks per batch entry or head; else there is one mask for all

    @classmethod
    def of(cls, mask: EncodedMask) -> Geometry:
        indexed = mask.n_masks > 1 or mask.mask_index.size > 1
        return cls(mask.s_q, mask.s_kv, mask.tile_m, mask.tile_n, mask.n_masks, indexed)

    @property
    def rows(self) -> int:
        return -(-self.s_q // self.tile_m)

    @property
    def cols(self) -> int:
        return -(-self.s_kv // self.tile_n)

    @property
    def name(self) -> str:
        return f"tiles{self.tile_m}x{self.tile_n}" + (f"_masks{self.n_masks}" if self.indexed else "")


def decode(b: FunctionBuilder, geometry: Geometry) -> str:
    """bool [1|B, 1|H, s_q, s_kv] from the inputs DECODE_INPUTS.

    Every tile is looked up in a table of distinct tiles: 0 is empty, 1 is full, 2 + i is part tile i.
    """
    g = geometry
    inner_m, inner_n = g.tile_m // 8, g.tile_n // 8
    empty_and_full = np.zeros((2, inner_m, inner_n, 8, 8), np.bool_)
    empty_and_full[1] = True
    table = b.op("Concat", b.const(empty_and_full, np.bool_), _unpack(b), axis=0, name="tiles")
    cut = b.op("Gather", table, _tile_numbers(b, g), axis=0, name="cut")  # [masks, rows, cols, m/8, n/8, 8, 8]
    whole = b.op("Transpose", cut, perm=[0, 1, 3, 5, 2, 4, 6])
    leading = (g.n_masks,) if g.indexed else (1, 1)
    dense = b.op("Reshape", whole, b.ints(*leading, g.rows * g.tile_m, g.cols * g.tile_n), name="dense")
    if (g.rows * g.tile_m, g.cols * g.tile_n) != (g.s_q, g.s_kv):
        dense = b.op("Slice", dense, b.ints(0, 0), b.ints(g.s_q, g.s_kv), b.ints(-2, -1), name="dense")
    return b.op("Gather", dense, "mask_index", axis=0, name="static") if g.indexed else dense


def _unpack(b: FunctionBuilder) -> str:
    """bitmap int32 [n, m/8, n/8, 2] to bool [n, m/8, n/8, 8, 8]. Byte r of the two words is row r, bit c column c."""
    words = b.op("Unsqueeze", b.op("Cast", "bitmap", to=onnx.TensorProto.UINT32), b.ints(4), name="words")
    shifted = b.op("BitShift", words, b.const([0, 8, 16, 24], np.uint32), direction="RIGHT")
    row_bytes = b.op("Mod", shifted, b.const(256, np.uint32), name="row_bytes")
    index = b.op("Reshape", b.op("Cast", row_bytes, to=onnx.TensorProto.INT32), b.ints(0, 0, 0, 8), name="index")
    byte_bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return b.op("Gather", b.const(byte_bits, np.bool_), index, axis=0, name="part_tiles")


def _tile_numbers(b: FunctionBuilder, g: Geometry) -> str:
    """int32 [n_masks, rows, cols]: which entry of the tile table stands where.

    The dummy entry of an empty list belongs to the row after the last, which is cut off.
    """
    size = (g.n_masks * g.rows + 1) * g.cols
    grid = b.const(np.zeros(size, np.int32), np.int32)
    full_at = _positions(b, "full", g)
    ones = b.op("Expand", b.const(1, np.int32), b.op("Shape", full_at), name="ones")
    grid = b.op("ScatterElements", grid, full_at, ones, axis=0, name="grid")
    part_at = _positions(b, "part", g)
    last = b.op("Add", b.op("Squeeze", b.op("Shape", part_at), b.ints(0)), b.const(2, np.int64), name="last")
    numbers = b.op("Range", b.const(2, np.int64), last, b.const(1, np.int64), name="numbers")
    numbers = b.op("Cast", numbers, to=onnx.TensorProto.INT32, name="numbers")
    grid = b.op("ScatterElements", grid, part_at, numbers, axis=0, name="grid")
    grid = b.op("Slice", grid, b.ints(0), b.ints(size - g.cols), name="grid")
    return b.op("Reshape", grid, b.ints(g.n_masks, g.rows, g.cols), name="tile_numbers")


def _positions(b: FunctionBuilder, kind: str, g: Geometry) -> str:
    """int32 [n]: where in the flat grid of tiles each list entry belongs, row * cols + column.

    The row of entry e is the number of rows that end at or before e: ends are counted by scattering and summed up.
    """
    count = b.op("Shape", f"{kind}_col_idx")
    ends = b.op("Slice", f"{kind}_row_ptr", b.ints(1), b.ints(g.rows + 1), b.ints(1), name=f"{kind}_ends")
    ends = b.op("Reshape", ends, b.ints(-1), name=f"{kind}_ends")
    room = b.op("Add", count, b.ints(1), name="room")
    zeros = b.op("Expand", b.const(0, np.int32), room, name="zeros")
    ones = b.const(np.ones(g.n_masks * g.rows, np.int32), np.int32)
    ended = b.op("ScatterElements", zeros, ends, ones, axis=0, reduction="add", name="ended")
    row = b.op("CumSum", ended, b.const(0, np.int64), name="row_after")
    # The reference evaluator of onnx 1.17 sums int32 into int64.
    row = b.op("Slice", b.op("Cast", row, to=onnx.TensorProto.INT32), b.ints(0), count, name=f"{kind}_row")
    return b.op("Add", b.op("Mul", row, b.const(g.cols, np.int32)), f"{kind}_col_idx", name=f"{kind}_at")
