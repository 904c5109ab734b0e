import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.mask import decode, decode_band, decode_one, encode

from tests.mask.dense_masks import matrices, tables, tile_sizes


@given(tables(), tile_sizes, tile_sizes)
def test_round_trip(table, tile_m, tile_n):
    decoded = decode(encode(table, tile_m, tile_n))
    assert decoded.dtype == np.bool_
    assert (np.broadcast_to(decoded, table.shape) == table).all()


@given(matrices(), tile_sizes, tile_sizes, st.data())
def test_any_rows(allowed, tile_m, tile_n, data):
    mask = encode(allowed, tile_m, tile_n)
    q0 = data.draw(st.integers(0, mask.s_q - 1))
    q1 = data.draw(st.integers(q0 + 1, mask.s_q))
    assert (decode_band(mask, q0, q1) == allowed[q0:q1]).all()


@pytest.mark.parametrize("rows", [(-1, 4), (0, 0), (3, 2), (0, 11)])
def test_rows_that_do_not_exist(rows):
    mask = encode(np.ones((10, 10), bool))
    with pytest.raises(StofError, match="10 rows"):
        decode_band(mask, *rows)
    with pytest.raises(StofError, match="1 distinct"):
        decode_one(mask, 1)
