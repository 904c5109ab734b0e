import numpy as np
from hypothesis import given
from stof_onnx.kernels.stats import launch_stats, row_work
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
