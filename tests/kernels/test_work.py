"""Work items counted from masks, against brute force over the tiles and against the lowered arrays."""

from __future__ import annotations

import numpy as np
import pytest
from stof_onnx.kernels.configs import KernelConfig, KernelSite, Tilings, candidates
from stof_onnx.kernels.lower_sm90 import lower_grouped
from stof_onnx.kernels.work import work_of
from stof_onnx.mask import EncodedMask, encode, encode_bands, statistics
from stof_onnx.mask.sources import causal, window


def site(batch: int = 3, heads: int = 4, dim: int = 64, dtype: str = "fp16", **changes: int) -> KernelSite:
    return KernelSite(batch, heads, dim, dim, dtype, 0.125, **changes)  # type: ignore[arg-type]


def random_mask(seed: int, seq: int = 512) -> EncodedMask:
    """Random blocks and elements, one global row of blocks, two distinct masks over four heads."""
    rng = np.random.default_rng(seed)
    blocks = seq // 32
    table = rng.random((1, 2, blocks, blocks)) < 0.1
    table[..., :2, :] = True
    masks = np.kron(table, np.ones((32, 32), bool)) & (rng.random((1, 2, seq, seq)) < 0.98)
    return encode(masks[:, [0, 1, 1, 0]])


@pytest.mark.parametrize("config", [("block_sm80", 64, 64), ("block_sm80", 128, 32), ("block_sm80", 64, 32)])
def test_steps_are_the_tiles_listed(config):
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    tilings = Tilings(random_mask(seed))
    tiled = tilings.get(*config[1:])
    work = work_of(tilings, KernelConfig(*config), site())
    heads = np.bincount(tiled.mask_index.ravel()) * 3
    assert work.items == 12 * tiled.rows
    for steps, pointers in ((work.full, tiled.full_row_ptr), (work.part, tiled.part_row_ptr)):
        assert float(work.count @ steps) == float(heads @ np.diff(pointers, axis=1).sum(axis=1))


@pytest.mark.parametrize("splits", [2, 4])
def test_split_rows_become_pieces(splits):
    tilings = Tilings(random_mask(1))
    whole = work_of(tilings, KernelConfig("block_sm80", 64, 64), site())
    cut = work_of(tilings, KernelConfig("block_sm80", 64, 64, splits, 1), site())
    assert cut.items == whole.items + 12 * (splits - 1)
    assert float(cut.count @ (cut.full + cut.part)) == pytest.approx(float(whole.count @ (whole.full + whole.part)))
    assert cut.joined_bytes == 12 * splits * 64 * (64 + 2) * 4
    assert whole.joined_bytes == 0


@pytest.mark.parametrize("bands", [2, 3])
@pytest.mark.parametrize("split_long", [True, False])
def test_groups_are_those_of_the_lowering(bands, split_long):
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    mask = random_mask(seed, 1024)
    work = work_of(Tilings(mask), KernelConfig("block_sm90", 64 * bands, 64, split_long=split_long), site())
    lowered = lower_grouped(mask, bands, 3.0 if split_long else float("inf"))
    lists = np.diff(lowered.arrays["full_row_ptr"], axis=1) + np.diff(lowered.arrays["part_row_ptr"], axis=1)
    used = (lowered.arrays["row_order"] >> 20 & 7) > 0
    heads = np.bincount(mask.mask_index.ravel())[:, None] * 3
    assert work.items == float((used * heads).sum())
    assert bool(work.early.any()) == (lowered.split_groups > 0)
    square = Tilings(mask).get(64, 64)
    assert float(work.count @ work.full) == float((np.diff(square.full_row_ptr, axis=1) * heads).sum())
    longest = (work.longest_full + work.longest_part).max()
    assert longest <= lists.max()


def test_row_wise_counts_keys():
    mask = encode_bands(window(300, 300, 20, 20), 300, 300)
    work = work_of(Tilings(mask), KernelConfig("row_wise", 64, 64), site(1, 1))
    keys = float(work.count @ work.full) * 64 * 4  # 64 keys a step, 4 rows a block
    assert keys == pytest.approx(statistics(mask).density * 300 * 300)


def test_bytes_of_tensors():
    mask = encode_bands(causal(128, 128), 128, 128)
    sizes = work_of(Tilings(mask), KernelConfig("block_sm80", 64, 64), site(2, 8, 64, kv_heads=2)).sizes
    assert sizes.io_bytes == 2 * 8 * 128 * (64 + 64) * 2 + 2 * 2 * 128 * (64 + 64) * 2
    assert sizes.heads == 16


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("dim", [32, 80, 128, 200])
def test_every_candidate_has_work(dtype, dim):
    tilings = Tilings(random_mask(3))
    wanted = site(dim=dim, dtype=dtype)
    for config in candidates(tilings, wanted, 90):
        work = work_of(tilings, config, wanted)
        lengths = {len(x) for x in (work.count, work.full, work.part, work.longest_full, work.pieces, work.early)}
        assert len(lengths) == 1
        assert (work.longest_full + work.longest_part <= work.full + work.part + 2).all()  # one mask tile
