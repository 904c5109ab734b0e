import sys

import numpy as np
import pytest
from hypothesis import given
from stof_onnx.errors import StofError
from stof_onnx.mask import encode, encode_bands, encode_packed

from tests.mask.dense_masks import matrices, tables, tile_bitmap, tile_kinds, tile_sizes


@given(matrices(), tile_sizes, tile_sizes)
def test_lists_and_bits_are_those_of_the_definition(allowed, tile_m, tile_n):
    mask = encode(allowed, tile_m, tile_n)
    mask.validate()
    kinds = tile_kinds(allowed, tile_m, tile_n)
    for row in range(mask.rows):
        full = mask.full_col_idx[slice(*mask.full_row_ptr[0, row : row + 2])]
        part_entries = range(*mask.part_row_ptr[0, row : row + 2])
        part = mask.part_col_idx[list(part_entries)]
        assert full.tolist() == np.flatnonzero(kinds[row] == "full").tolist()
        assert part.tolist() == np.flatnonzero(kinds[row] == "part").tolist()
        for entry, col in zip(part_entries, part, strict=True):
            assert mask.bitmap[entry].tolist() == tile_bitmap(allowed, row, col, tile_m, tile_n)
    work = (kinds != "empty").sum(axis=1)
    assert mask.row_order[0].tolist() == sorted(range(mask.rows), key=lambda row: -work[row])


@given(tables(), tile_sizes, tile_sizes)
def test_equal_masks_are_stored_once(table, tile_m, tile_n):
    mask = encode(table, tile_m, tile_n)
    mask.validate()
    assert mask.n_masks == len({m.tobytes() for m in table.reshape(-1, *table.shape[2:])})
    index = np.broadcast_to(mask.mask_index, table.shape[:2])
    for b, h in np.ndindex(*table.shape[:2]):
        alone = encode(table[b, h], tile_m, tile_n)
        m = index[b, h]
        full = slice(mask.full_row_ptr[m, 0], mask.full_row_ptr[m, -1])
        part = slice(mask.part_row_ptr[m, 0], mask.part_row_ptr[m, -1])
        assert (mask.full_col_idx[full] == alone.full_col_idx).all()
        assert (mask.bitmap[part] == alone.bitmap).all()
        assert (mask.full_row_ptr[m] - mask.full_row_ptr[m, 0] == alone.full_row_ptr[0]).all()
        assert (mask.row_order[m] == alone.row_order[0]).all()


@given(tables(), tile_sizes, tile_sizes)
def test_packed_and_streamed_input_encode_alike(table, tile_m, tile_n):
    mask = encode(table, tile_m, tile_n)
    s_kv = table.shape[-1]
    packed = np.packbits(table, axis=-1, bitorder="little")
    if s_kv % 8:
        packed[..., -1] |= np.uint8(0xFF << s_kv % 8 & 0xFF)  # bits past s_kv are ignored
    assert encode_packed(packed, s_kv, tile_m, tile_n) == mask

    matrices_ = table.reshape(-1, *table.shape[2:])
    index = np.arange(len(matrices_)).reshape(table.shape[:2])
    sources = [lambda q0, q1, m=m: m[q0:q1] for m in matrices_]
    assert encode_bands(sources, *table.shape[2:], tile_m, tile_n, index) == mask


def test_bands_are_asked_for_once_in_order_and_stay_small():
    asked = []

    def source(q0, q1):
        asked.append((q0, q1))
        return np.zeros((q1 - q0, 100_000), bool)

    mask = encode_bands(source, 1000, 100_000)
    assert [q0 for q0, _ in asked] == [0, *[q1 for _, q1 in asked[:-1]]] and asked[-1][1] == 1000
    assert max(q1 - q0 for q0, q1 in asked) <= 64
    assert (mask.n_full, mask.n_part) == (0, 0)


def test_broadcast_axes_are_encoded_once(monkeypatch):
    module = sys.modules["stof_onnx.mask.encode"]
    sorts = []
    original = module._sort
    monkeypatch.setattr(module, "_sort", lambda *args: sorts.append(1) or original(*args))
    mask = encode(np.broadcast_to(np.tril(np.ones((70, 70), bool)), (4, 8, 70, 70)))
    assert len(sorts) == 1 and mask.mask_index.shape == (1, 1)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((4, 4), np.float32), "float32"),
        (np.zeros(4, bool), "[4]"),
        (np.zeros((2, 4, 4), bool), "[2, 4, 4]"),
        (np.zeros((0, 4), bool), "no elements"),
        (np.zeros((1, 0, 4, 4), bool), "no elements"),
    ],
)
def test_refuses_what_is_not_a_mask(array, said):
    with pytest.raises(StofError) as error:
        encode(array)
    assert said in str(error.value) and error.value.advice


@pytest.mark.parametrize("tiles", [(0, 64), (64, 12), (-8, 64)])
def test_refuses_other_tile_sizes(tiles):
    with pytest.raises(StofError, match="multiple of 8"):
        encode(np.ones((4, 4), bool), *tiles)


def test_refuses_sources_that_return_something_else():
    for wrong in (np.zeros((9, 16), bool), np.zeros((8, 15), bool), np.zeros((8, 16), np.uint8)):
        with pytest.raises(StofError, match="row-band source"):
            encode_bands(lambda q0, q1, rows=wrong: rows, 8, 16)


def test_refuses_an_index_that_names_no_source():
    def source(q0, q1):
        return np.ones((q1 - q0, 8), bool)

    for index in ([[1]], [[-1]], [0], np.zeros((0, 1), int)):
        with pytest.raises(StofError, match="mask_index"):
            encode_bands(source, 8, 8, mask_index=np.array(index))
    with pytest.raises(StofError, match="mask_index"):
        encode_bands([source, source], 8, 8)


def test_refuses_packed_rows_of_another_length():
    with pytest.raises(StofError, match="Check s_kv"):
        encode_packed(np.zeros((8, 2), np.uint8), 17)
    with pytest.raises(StofError, match="uint8"):
        encode_packed(np.zeros((8, 2), bool), 16)
