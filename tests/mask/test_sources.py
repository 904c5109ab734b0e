import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.mask import encode, encode_bands, statistics
from stof_onnx.mask.sources import all_keys, causal, key_runs, window

sizes = st.integers(1, 150)


@given(sizes, sizes, st.integers(0, 60), st.integers(0, 60))
def test_are_what_they_say(s_q, s_kv, left, right):
    q, k = np.arange(s_q)[:, None], np.arange(s_kv)[None, :]
    for source, allowed in (
        (all_keys(s_q, s_kv), k + 0 * q >= 0),
        (causal(s_q, s_kv), k <= q),
        (causal(s_q, s_kv, bottom_right=True), k <= q + s_kv - s_q),
        (window(s_q, s_kv, left, right), (k >= q - left) & (k <= q + right)),
    ):
        assert encode_bands(source, s_q, s_kv) == encode(allowed)


def test_runs_may_reach_outside_or_hold_nothing():
    rows = key_runs(np.array([-5, 3, 7, 9]), np.array([2, 3, 5, 40]), 10)(0, 4)
    assert [np.flatnonzero(row).tolist() for row in rows] == [[0, 1], [], [], [9]]


@pytest.mark.slow
def test_131072_keys_are_streamed():
    """Every figure of a window over 131072 keys is known in closed form."""
    size, width = 131072, 256
    stats = statistics(encode_bands(window(size, size, width, width), size, size))
    (one,) = stats.per_mask
    assert one.allowed == size * (2 * width + 1) - width * (width + 1)
    per_row = 2 * (width // 64) + 1  # the two outermost tiles are part, those between are full
    assert one.max_row_tiles == per_row
    assert one.full + one.part == 2048 * per_row - 2 * sum(range(1, width // 64 + 1))
