import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.mask import decode, encode, leading_submatrix, retile

from tests.mask.dense_masks import tables, tile_sizes


@given(tables(max_size=200), tile_sizes, tile_sizes, tile_sizes, tile_sizes)
def test_is_what_encoding_in_the_new_tiles_gives(table, from_m, from_n, to_m, to_n):
    mask = retile(encode(table, from_m, from_n), to_m, to_n)
    mask.validate()
    assert mask == encode(table, to_m, to_n)
    assert (np.broadcast_to(decode(mask), table.shape) == table).all()


@given(tables(), tile_sizes, tile_sizes, st.data())
def test_leading_submatrix(table, tile_m, tile_n, data):
    s_q = data.draw(st.integers(1, table.shape[2]))
    s_kv = data.draw(st.integers(1, table.shape[3]))
    cut = leading_submatrix(encode(table, tile_m, tile_n), s_q, s_kv)
    cut.validate()
    assert cut == encode(table[:, :, :s_q, :s_kv], tile_m, tile_n)


def test_bands_meet_where_tiles_of_both_sizes_begin():
    """Wide enough for several bands, with tile heights that share few multiples."""
    rng = np.random.default_rng()
    allowed = np.repeat(rng.random((500, 300)) < 0.02, 40, axis=1)[:, :11_999]
    for tile_m in (8, 24, 40, 56):
        assert retile(encode(allowed, 64, 64), tile_m, 128) == encode(allowed, tile_m, 128)


def test_refuses_other_tile_sizes_and_larger_matrices():
    mask = encode(np.ones((70, 70), bool))
    with pytest.raises(StofError, match="multiple of 8"):
        retile(mask, 60, 64)
    for size in ((71, 70), (70, 71), (0, 70)):
        with pytest.raises(StofError, match="not inside"):
            leading_submatrix(mask, *size)
