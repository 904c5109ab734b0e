from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.kernels.fragments import fragment_words
from stof_onnx.mask import encode, retile

from tests.mask.dense_masks import matrices


@settings(max_examples=30)
@given(matrices(), st.sampled_from([16, 32, 48, 64, 128]), st.sampled_from([64, 128]))
def test_each_lane_finds_its_accumulators(allowed, tile_m, tile_n):
    """Bit r of lane l's word is accumulator register r of the band, placed as PTX places it for m16n8 fragments."""
    mask = encode(allowed, tile_m, tile_n)
    words = fragment_words(mask.bitmap)
    assert words.shape == (mask.n_part, tile_m // 16, tile_n // 64, 32) and words.dtype == np.uint32
    padded = np.zeros((mask.rows * tile_m, mask.cols * tile_n), bool)
    padded[: mask.s_q, : mask.s_kv] = allowed
    tile_rows = np.repeat(np.arange(mask.rows), np.diff(mask.part_row_ptr[0]))
    for entry in range(mask.n_part):
        top, left = tile_rows[entry] * tile_m, mask.part_col_idx[entry] * tile_n
        for band_m, band_n in product(range(tile_m // 16), range(tile_n // 64)):
            for lane in range(32):
                group, thread = lane >> 2, lane & 3
                expected = 0
                for register in range(32):
                    fragment, c = divmod(register, 4)  # c0..c3 of the m16n8 fragment at columns 8 * fragment
                    row = group if c < 2 else group + 8
                    col = thread * 2 + (c & 1)
                    element = padded[top + 16 * band_m + row, left + 64 * band_n + 8 * fragment + col]
                    expected |= int(element) << register
                assert words[entry, band_m, band_n, lane] == expected


@settings(max_examples=20)
@given(matrices(), st.sampled_from([16, 64, 128]))
def test_narrow_tiles_are_the_halves_of_wide_ones(allowed, tile_m):
    """Bit 4j + 2i + e of a 16x32 band is bit 16 * half + 4j + 2i + e of the 16x64 band that it is half of."""
    wide = retile(encode(allowed), tile_m, 64)
    words = fragment_words(wide.bitmap)
    expected = [words & 0xFFFF, words >> 16]
    for half in range(2):
        narrow = np.ascontiguousarray(wide.bitmap[:, :, 4 * half : 4 * half + 4])
        lanes = fragment_words(narrow).view(np.uint16)
        assert lanes.shape == (wide.n_part, tile_m // 16, 1, 32)
        assert (lanes == expected[half]).all()


def test_many_tiles_are_packed_in_chunks():
    rng = np.random.default_rng()
    bitmap = rng.integers(0, 2**64, (5000, 8, 8), dtype=np.uint64)
    words = fragment_words(bitmap)
    for entry in (0, 4095, 4096, 4999):
        assert (words[entry] == fragment_words(bitmap[entry : entry + 1])[0]).all()
    assert np.bitwise_xor.reduce(words.ravel()) == np.bitwise_xor.reduce(words[::-1].ravel())


@pytest.mark.parametrize("tile", [(8, 64), (24, 64), (64, 96)])
def test_tiles_that_are_not_bands(tile):
    mask = encode(np.tril(np.ones((200, 200), bool)), *tile)
    with pytest.raises(StofError, match="16 x 64 bands"):
        fragment_words(mask.bitmap)
