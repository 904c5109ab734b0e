import numpy as np
from hypothesis import given
from stof_onnx.mask import encode, keys_per_row, rows_without_keys, statistics
from stof_onnx.mask.statistics import row_tiles, tile_allowed

from tests.mask.dense_masks import matrices, tables, tile_kinds, tile_sizes


@given(matrices(), tile_sizes, tile_sizes)
def test_figures_of_one_mask(allowed, tile_m, tile_n):
    mask = encode(allowed, tile_m, tile_n)
    kinds = tile_kinds(allowed, tile_m, tile_n)
    (one,) = statistics(mask).per_mask
    assert (one.full, one.part, one.empty) == tuple((kinds == kind).sum() for kind in ("full", "part", "empty"))
    assert one.allowed == allowed.sum()
    assert one.max_row_tiles == (kinds != "empty").sum(axis=1).max()
    keys = allowed.sum(axis=1)
    assert (keys_per_row(mask) == keys).all()
    assert rows_without_keys(mask).tolist() == np.flatnonzero(~allowed.any(axis=1)).tolist()
    assert one.rows_without_keys == (~allowed.any(axis=1)).sum()
    spread = one.keys_per_row
    ordered = np.sort(keys)
    at = [ordered[int(np.floor(share * (len(keys) - 1)))] for share in (0, 0.25, 0.5, 0.75, 1)]
    assert [spread.min, spread.quartile1, spread.median, spread.quartile3, spread.max] == at
    assert spread.mean == keys.sum() / len(keys)
    in_part = np.repeat(np.repeat(kinds == "part", tile_m, 0), tile_n, 1)[: allowed.shape[0], : allowed.shape[1]]
    assert one.part_allowed == (allowed & in_part).sum()
    assert (row_tiles(mask)[0] == (kinds != "empty").sum(axis=1)).all()


@given(matrices(), tile_sizes, tile_sizes)
def test_allowed_elements_of_each_tile(allowed, tile_m, tile_n):
    mask = encode(allowed, tile_m, tile_n)
    padded = np.zeros((mask.rows * tile_m, mask.cols * tile_n), int)
    padded[: mask.s_q, : mask.s_kv] = allowed
    assert (tile_allowed(mask) == padded.reshape(mask.rows, tile_m, mask.cols, tile_n).sum(axis=(1, 3))).all()


@given(tables())
def test_figures_of_a_table_count_masks_as_often_as_used(table):
    stats = statistics(encode(table))
    assert np.isclose(stats.density, table.mean(), rtol=1e-14, atol=0)
    kinds = np.stack([tile_kinds(m, 64, 64) for m in table.reshape(-1, *table.shape[2:])])
    for kind in ("full", "part", "empty"):
        assert np.isclose(getattr(stats, kind), (kinds == kind).sum() / len(kinds), rtol=1e-14, atol=0)
    assert stats.max_row_tiles == (kinds != "empty").sum(axis=2).max()
    assert stats.rows_without_keys == (~table.any(axis=3)).sum(axis=2).max()
