import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.kernels.stats import launch_stats, row_work, suggest_splits
from stof_onnx.mask import encode

from tests.mask.dense_masks import tables, tile_kinds, tile_sizes


@given(tables(), tile_sizes, tile_sizes)
def test_figures(table, tile_m, tile_n):
    mask = encode(table, tile_m, tile_n)
    distinct = {m.tobytes(): m for m in table.reshape(-1, *table.shape[2:])}
    kinds = np.stack([tile_kinds(m, tile_m, tile_n) for m in distinct.values()])
    stats = launch_stats(mask)
    full, part = (kinds == "full").sum(axis=2), (kinds == "part").sum(axis=2)
    assert (stats.n_masks, stats.rows, stats.cols) == kinds.shape
    assert (stats.n_full, stats.n_part, stats.total_tiles) == (full.sum(), part.sum(), kinds.size)
    assert stats.max_row_tiles == (full + part).max()
    assert (stats.max_row_full, stats.max_row_part) == (full.max(), part.max())
    assert stats.empty_rows == (full + part == 0).sum()
    attributes = stats.attributes()
    assert attributes["mask_n_full"] == stats.n_full
    assert all(type(value) is int for value in attributes.values())


def test_row_work_weighs_the_kinds():
    mask = encode(np.tril(np.ones((192, 192), bool)))
    assert row_work(mask, 1.0, 1.5).tolist() == [[1.5, 2.5, 3.5]]


def longest_first(lengths, slots, splits, cost):
    """When the last slot is done: pieces handed out longest first, as a persistent kernel does."""
    pieces = []
    for n in lengths.tolist():
        step = -(-n // splits)
        pieces += [min(step, n - at) + (cost if splits > 1 else 0) for at in range(0, n, step or 1)]
    done = np.zeros(slots)
    for piece in sorted(pieces, reverse=True):
        done[np.argmin(done)] += piece
    return done.max()


@given(tables(max_size=300), st.integers(1, 4), st.integers(1, 140), st.floats(0, 4))
def test_suggested_splits_are_the_fewest_near_the_best(table, heads, slots, cost):
    mask = encode(table[:1, :1], 16, 16)
    lengths = np.tile(np.diff(mask.full_row_ptr + mask.part_row_ptr, axis=1).ravel(), heads)
    splits = suggest_splits(mask, 1, heads, slots, cost)
    most = max(1, lengths.max())
    tried = [s for s in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if s < most] + [most]
    times = [longest_first(lengths, slots, s, cost) for s in tried]
    assert splits == next(s for s, time in zip(tried, times, strict=True) if time <= 1.05 * min(times))


def test_splits_where_row_tiles_are_few():
    full = encode(np.ones((64, 8192), bool), 64, 64)
    assert suggest_splits(full, 1, 1, 132) >= 8
    assert suggest_splits(full, 16, 16, 132) == 1
    assert suggest_splits(full, 1, 1, 132, max_splits=1) == 1
    assert suggest_splits(encode(np.zeros((64, 64), bool)), 1, 1, 132) == 1


def test_index_must_fit_the_grid():
    rng = np.random.default_rng()
    mask = encode(rng.random((1, 3, 64, 64)) < 0.5)
    with pytest.raises(StofError, match="4 heads"):
        suggest_splits(mask, 1, 4, 132)
