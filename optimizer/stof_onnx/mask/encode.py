"""Dense, bit-packed or streamed boolean masks to `EncodedMask`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from stof_onnx.errors import StofError
from stof_onnx.mask.bits import INNER, U8, Ints, ceil_div, words_from_bytes
from stof_onnx.mask.encoded import EncodedMask
from stof_onnx.mask.tiles import TileLists, TileSorter, assemble

Bools = npt.NDArray[np.bool_]
RowBands = Callable[[int, int], Bools]
"""`source(q0, q1)` gives rows q0..q1-1 of a mask, bool [q1 - q0, s_kv]. Bands are asked for once, in order."""

_BAND_ELEMENTS = 1 << 22  # elements of one band: 4 MB of bool and 0.5 MB of bits, which stay in the cache


def encode(allowed: Bools, tile_m: int = 64, tile_n: int = 64) -> EncodedMask:
    """Encodes a dense mask.

    Args:
        allowed: bool, True = attend; [S_q, S_kv], or [B or 1, H or 1, S_q, S_kv], where equal masks are stored once.
        tile_m, tile_n: tile size in elements, multiples of 8.

    Raises:
        StofError: another dtype or rank, a zero-sized axis, or a tile size that is not a multiple of 8.
    """
    array = np.asarray(allowed)
    if array.dtype != np.bool_:
        raise StofError(
            f"the mask is {array.dtype}, expected bool", "mask", "Compare it first: True means the key is attended to"
        )
    s_q, s_kv = _matrix_size(array.shape, "[S_q, S_kv] or [B, H, S_q, S_kv]")

    def lists_of(matrix: Bools) -> TileLists:
        return _sort(lambda q0, q1: np.packbits(matrix[q0:q1], axis=1, bitorder="little"), s_q, s_kv, tile_m, tile_n)

    return _encode_table(array, lists_of, s_q, s_kv, tile_m, tile_n)


def encode_packed(packed: U8, s_kv: int, tile_m: int = 64, tile_n: int = 64) -> EncodedMask:
    """Encodes a bit-packed mask.

    Args:
        packed: uint8 [S_q, ceil(S_kv/8)] or [B or 1, H or 1, S_q, ceil(S_kv/8)]; bit j of byte i is key 8i + j
            (`numpy.packbits(..., bitorder="little")`). Bits past s_kv are ignored.
        s_kv: the number of keys.
        tile_m, tile_n: tile size in elements, multiples of 8.

    Raises:
        StofError: as `encode`, or a row whose bytes do not fit s_kv.
    """
    array = np.asarray(packed)
    if array.dtype != np.uint8:
        raise StofError(f"the packed mask is {array.dtype}, expected uint8", "mask", "Pack it with numpy.packbits")
    s_q, n_bytes = _matrix_size(array.shape, "[S_q, S_kv/8] or [B, H, S_q, S_kv/8]")
    if n_bytes != ceil_div(s_kv, 8):
        raise StofError(f"a row has {n_bytes} bytes, but {s_kv} keys need {ceil_div(s_kv, 8)}", "mask", "Check s_kv")
    last_byte = np.uint8(0xFF >> (-s_kv % 8))

    def lists_of(matrix: U8) -> TileLists:
        def band(q0: int, q1: int) -> U8:
            rows = matrix[q0:q1].copy()
            rows[:, -1] &= last_byte
            return rows

        return _sort(band, s_q, s_kv, tile_m, tile_n)

    return _encode_table(array, lists_of, s_q, s_kv, tile_m, tile_n)


def encode_bands(
    sources: RowBands | Sequence[RowBands],
    s_q: int,
    s_kv: int,
    tile_m: int = 64,
    tile_n: int = 64,
    mask_index: Ints | None = None,
) -> EncodedMask:
    """Encodes masks that are never held whole: each source is asked for its rows band by band.

    Args:
        sources: one row-band source, or one for each distinct mask.
        s_q, s_kv: the size of each mask.
        tile_m, tile_n: tile size in elements, multiples of 8.
        mask_index: [B or 1, H or 1], the source each batch entry and head uses; may be left out for one source.

    Raises:
        StofError: a source that returns another dtype or shape than asked for, or an index that names no source.
    """
    table = [sources] if callable(sources) else list(sources)
    index = np.zeros((1, 1), np.int32) if mask_index is None else np.asarray(mask_index)
    if index.ndim != 2 or not index.size or index.min() < 0 or index.max() >= len(table):
        raise StofError(
            f"mask_index of shape {list(index.shape)} does not name the {len(table)} masks given",
            "mask_index",
            "Give [B or 1, H or 1] with entries from 0 to the number of masks - 1",
        )
    if mask_index is None and len(table) != 1:
        raise StofError(f"{len(table)} masks, but no mask_index", "mask_index", "Say which mask each head uses")

    def lists_of(source: RowBands) -> TileLists:
        def band(q0: int, q1: int) -> U8:
            rows = np.asarray(source(q0, q1))
            if rows.dtype != np.bool_ or rows.shape != (q1 - q0, s_kv):
                raise StofError(
                    f"rows {q0}..{q1} came as {rows.dtype} {list(rows.shape)}, expected bool {[q1 - q0, s_kv]}",
                    "row-band source",
                    "Return exactly the rows asked for",
                )
            return np.packbits(rows, axis=1, bitorder="little")

        return _sort(band, s_q, s_kv, tile_m, tile_n)

    return assemble([lists_of(source) for source in table], index, s_q, s_kv, tile_m, tile_n)


def _matrix_size(shape: tuple[int, ...], expected: str) -> tuple[int, int]:
    if len(shape) not in (2, 4):
        raise StofError(f"the mask has shape {list(shape)}, expected {expected}", "mask", "Add the missing axes as 1")
    if 0 in shape:
        raise StofError(f"the mask has shape {list(shape)}: no elements", "mask", "Give at least one query and one key")
    return shape[-2], shape[-1]


def _encode_table(
    array: npt.NDArray,
    lists_of: Callable[[npt.NDArray], TileLists],
    s_q: int,
    s_kv: int,
    tile_m: int,
    tile_n: int,
) -> EncodedMask:
    table = array.reshape(1, 1, *array.shape) if array.ndim == 2 else array
    # A broadcast axis (stride 0) repeats one mask: encode it once.
    table = table[tuple(slice(0, 1) if table.strides[axis] == 0 else slice(None) for axis in (0, 1))]
    index = np.arange(table.shape[0] * table.shape[1]).reshape(table.shape[:2])
    lists = [lists_of(table[b, h]) for b, h in np.ndindex(*table.shape[:2])]
    return assemble(lists, index, s_q, s_kv, tile_m, tile_n)


def _sort(band: Callable[[int, int], U8], s_q: int, s_kv: int, tile_m: int, tile_n: int) -> TileLists:
    """Sorts the tiles of one mask given as packed row bands (bits past s_kv are 0)."""
    sorter = TileSorter(s_q, s_kv, tile_m, tile_n)
    cols = np.arange(sorter.cols)
    for q0, q1 in bands(s_q, s_kv, tile_m):
        padded = (ceil_div(q1 - q0, tile_m) * tile_m, sorter.cols * tile_n // INNER)
        packed = band(q0, q1)
        if packed.shape != padded:
            rows = np.zeros(padded, np.uint8)
            rows[: packed.shape[0], : packed.shape[1]] = packed
            packed = rows
        sorter.add(words_from_bytes(packed), cols)
    return sorter.finish()


def bands(s_q: int, s_kv: int, step: int) -> Iterator[tuple[int, int]]:
    """Row ranges (q0, q1) that cover 0..s_q, each a multiple of `step` but the last, of a few million elements."""
    height = max(1, _BAND_ELEMENTS // (s_kv * step)) * step
    for q0 in range(0, s_q, height):
        yield q0, min(q0 + height, s_q)
