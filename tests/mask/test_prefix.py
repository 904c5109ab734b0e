import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.mask import encode, first_prefix_break, square_sizes

from tests.mask.dense_masks import tables


def causal(s_q, s_kv):
    return np.tril(np.ones((s_q, s_kv), bool))


def bottom_right(s_q, s_kv):
    return np.tril(np.ones((s_q, s_kv), bool), s_kv - s_q)


def last_block_global(s_q, s_kv):
    """BigBird's last block column sees and is seen by all."""
    allowed = np.abs(np.arange(s_q)[:, None] - np.arange(s_kv)) <= 8
    allowed[:, (s_kv - 1) // 16 * 16 :] = True
    return allowed


def test_causal_is_prefix_stable():
    assert first_prefix_break(encode(causal(150, 150)), causal, square_sizes(150)) is None
    assert first_prefix_break(encode(causal(90, 150)), causal, [(1, 1), (90, 20), (33, 149)]) is None


@given(tables(max_size=60), st.data())
def test_cut_masks_are_prefix_stable_until_one_element_differs(table, data):
    largest = encode(table)
    s_q, s_kv = table.shape[2:]
    sizes = [(q, k) for q in {1, s_q // 2 + 1, s_q} for k in {1, s_kv // 2 + 1, s_kv}]
    assert first_prefix_break(largest, lambda q, k: table[:, :, :q, :k], sizes) is None

    wrong = data.draw(st.sampled_from(sizes))
    at = tuple(data.draw(st.integers(0, n - 1)) for n in (*table.shape[:2], *wrong))

    def one_off(q, k):
        cut = table[:, :, :q, :k].copy()
        if (q, k) == wrong:
            cut[at] ^= True
        return cut

    found = first_prefix_break(largest, one_off, sizes)
    assert (found.s_q, found.s_kv) == wrong
    # A break is told by the mask's own heads, or by the first of those that share it.
    assert found.index[2:] == at[2:] and found.allowed != table[at]


def test_masks_with_an_end_are_not():
    found = first_prefix_break(encode(last_block_global(100, 100)), last_block_global, square_sizes(100))
    assert found is not None and (found.s_q, found.s_kv) == (96, 96)
    assert "at 96 x 96 key" in str(found)
    found = first_prefix_break(encode(bottom_right(20, 40)), bottom_right, [(10, 40)])
    assert found.index == (0, 0, 0, 21) and found.allowed


def test_encoded_masks_are_taken_in_any_tiles():
    largest = encode(causal(100, 100))
    assert first_prefix_break(largest, lambda q, k: encode(causal(q, k), 16, 8), [(50, 50)]) is None
    found = first_prefix_break(largest, lambda q, k: encode(~causal(q, k), 16, 8), [(50, 50)])
    assert found.index == (0, 0, 0, 0) and not found.allowed


def test_sizes_must_fit():
    largest = encode(causal(20, 20))
    with pytest.raises(StofError, match="Return the size asked for"):
        first_prefix_break(largest, lambda q, k: causal(q + 1, k), [(10, 10)])
    with pytest.raises(StofError, match="not inside"):
        first_prefix_break(largest, causal, [(21, 21)])


def test_square_sizes_start_with_the_largest():
    assert list(square_sizes(4)) == [(3, 3), (2, 2), (1, 1)]
    assert list(square_sizes(20, 4, 8)) == [(19, 19), (11, 11)]
