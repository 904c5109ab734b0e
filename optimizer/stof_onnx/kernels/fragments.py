"""The bitmap in fragment order: one coalesced 32-bit load gives a lane all its bits of a 16x64 band.

In the accumulators of mma.m16n8 and wgmma.m64nN lane l holds, of each 8x8 inner tile, row l/4 and columns 2(l%4) and
2(l%4) + 1, which are the inner tile's bits 2l and 2l + 1. A band is 2 x 8 inner tiles. In lane l's word, bit

    4j + 2i + e  is element (row 8i + l/4, column 8j + 2(l%4) + e) of the band,  i, e in 0..1, j in 0..7,

so bit r belongs to the lane's accumulator register r, counted over the band's eight m16n8 fragments (mma) or over 64
columns of the wgmma accumulator, where warp w of the warpgroup owns band w of each 64 rows.

Tiles 32 columns wide have bands of 16x32: a lane's 16 bits (j in 0..3), two lanes to a word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stof_onnx.errors import StofError
from stof_onnx.mask.bits import INNER

BAND_M, BAND_N, LANES = 16, 64, 32
NARROW_N = 32
_CHUNK_WORDS = 1 << 18  # inner tiles unpacked at a time: 16 MB of bits as bytes


def fragment_words(bitmap: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Repacks part-tile bitmaps.

    Args:
        bitmap: uint64 [n_part, tile_m/8, tile_n/8], bit 8r + c is element (r, c) of an inner tile.

    Returns:
        uint32 [n_part, tile_m/16, tile_n/64, 32]: a word a lane for every band; with tile_n = 32
        [n_part, tile_m/16, 1, 16], lane l in half l % 2 of word l / 2. The same number of bytes as the bitmap.

    Raises:
        StofError: tiles that are not whole bands.
    """
    n_part, inner_m, inner_n = bitmap.shape
    band_n = NARROW_N if inner_n * INNER == NARROW_N else BAND_N
    if inner_m * INNER % BAND_M or inner_n * INNER % band_n:
        raise StofError(
            f"a tile of {inner_m * INNER} x {inner_n * INNER} is not made of {BAND_M} x {BAND_N} bands",
            "fragment order",
            "Use the plain bitmap with this tile shape",
        )
    bands_m, bands_n = inner_m * INNER // BAND_M, inner_n * INNER // band_n
    out = np.empty((n_part, bands_m, bands_n, LANES * band_n // BAND_N), np.uint32)
    step = max(1, _CHUNK_WORDS // (inner_m * inner_n))
    for start in range(0, n_part, step):
        chunk = np.ascontiguousarray(bitmap[start : start + step], dtype="<u8")
        bits = np.unpackbits(chunk.view(np.uint8), axis=-1, bitorder="little")
        # [tile, band row, i, band column, j, lane, e]; a lane's word wants (j, i, e), e fastest.
        pieces = bits.reshape(len(chunk), bands_m, 2, bands_n, band_n // INNER, LANES, 2).transpose(0, 1, 3, 5, 4, 2, 6)
        words = np.packbits(pieces.reshape(len(chunk), bands_m, bands_n, -1, 32), axis=-1, bitorder="little")
        out[start : start + step] = words.view("<u4")[..., 0]
    return out
