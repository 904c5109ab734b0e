from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.kernels.lower_sm90 import BAND, GroupedMask, lower_grouped
from stof_onnx.mask import encode

from tests.mask.dense_masks import tables


def band_of_words(words: np.ndarray) -> np.ndarray:
    """bool [64, keys] from the [4, keys/64, 32] words of a band, bit by bit as the accumulators of a warpgroup lie."""
    halves = words.shape[1]
    out = np.zeros((BAND, 64 * halves), bool)
    lane = np.arange(32)
    for warp, half, bit in np.ndindex(4, halves, 32):
        row = 16 * warp + lane // 4 + 8 * (bit // 2 % 2)
        column = 64 * half + 8 * (bit // 4) + 2 * (lane % 4) + bit % 2
        out[row, column] = words[warp, half] >> np.uint32(bit) & 1
    return out


def expand(grouped: GroupedMask, number: int, s_q: int, s_kv: int) -> np.ndarray:
    """The dense mask, walked as the kernel walks it; every band belongs to exactly one group."""
    arrays, words = grouped.arrays, grouped.arrays["bitmap"].view(np.uint32)
    keys = grouped.keys
    rows, cols = -(-s_q // BAND), -(-s_kv // keys)
    assert cols == grouped.cols
    out = np.zeros((rows * BAND, cols * keys), bool)
    owners = np.zeros(rows, int)
    for group in range(grouped.groups):
        order = int(arrays["row_order"][number, group])
        first, count, split = order & 0xFFFFF, order >> 20 & 7, order >> 23 & 1
        assert count <= grouped.bands and (not split or count == 1)
        assert split == 0 or group < grouped.split_groups
        owners[first : first + count] += 1
        full = arrays["full_col_idx"][slice(*arrays["full_row_ptr"][number, group : group + 2])]
        part = slice(*arrays["part_row_ptr"][number, group : group + 2])
        for i in range(count):
            rows_of = out[(first + i) * BAND : (first + i + 1) * BAND]
            for column in full:
                rows_of[:, column * keys : (column + 1) * keys] = True
            for entry in range(part.start, part.stop):
                packed = int(arrays["part_col_idx"][entry]) & 0xFFFFFFFF
                column, code = packed & 0xFFFFFF, packed >> (24 + 2 * i) & 3
                if code:
                    tile = np.True_ if code == 1 else band_of_words(words[entry, i])
                    rows_of[:, column * keys : (column + 1) * keys] = tile
    assert (owners == 1).all()
    return out[:s_q, :s_kv]


@given(tables(max_size=300), st.sampled_from([2, 3]), st.sampled_from([64, 128]), st.sampled_from([1.0, 3.0]))
def test_groups_hold_the_dense_mask(table, bands, keys, ratio):
    grouped = lower_grouped(encode(table), bands, ratio, keys=keys)
    index = np.broadcast_to(grouped.arrays["mask_index"], table.shape[:2])
    for b, h in np.ndindex(*table.shape[:2]):
        assert (expand(grouped, index[b, h], *table.shape[2:]) == table[b, h]).all()
    assert all(a.dtype == np.int32 and a.size for a in grouped.arrays.values())


@pytest.mark.parametrize("bands", [2, 3])
def test_global_rows_are_split_and_lead(bands):
    q, k = np.arange(2048)[:, None], np.arange(2048)[None, :]
    allowed = (abs(q - k) <= 32) | (q < 64) | (k < 64)
    grouped = lower_grouped(encode(allowed), bands)
    order = grouped.arrays["row_order"][0]
    assert grouped.split_groups == 1 and order[0] == 0 | 1 << 20 | 1 << 23
    listed = np.diff(grouped.arrays["full_row_ptr"]) + np.diff(grouped.arrays["part_row_ptr"])
    assert listed[0, 0] == 32 and grouped.max_group_tiles == 32
    assert (listed[0, 2:] <= listed[0, 1:-1]).all()
    assert (expand(grouped, 0, 2048, 2048) == allowed).all()


def test_arrays_are_validated_first():
    mask = encode(np.tril(np.ones((200, 200), bool)))
    mask = replace(mask, part_col_idx=np.array(mask.part_col_idx) + 1)
    with pytest.raises(StofError, match="layer 7"):
        lower_grouped(mask, 2, where="layer 7")
