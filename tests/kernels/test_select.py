"""The rules that pick a kernel, at the shapes they were measured at."""

from __future__ import annotations

import numpy as np
import pytest
from stof_onnx.attention.types import BiasKind, KvKind, MaskedRow
from stof_onnx.kernels.select import Device, KernelSite, choose, lower_site
from stof_onnx.mask import EncodedMask, encode, encode_bands
from stof_onnx.mask.sources import causal, window

A100, H200 = Device(80, 108), Device(90, 132)


def site(batch: int = 16, heads: int = 12, dim: int = 64, **changes: object) -> KernelSite:
    return KernelSite(batch, heads, dim, dim, **({"dtype": "fp16", "scale": 0.125} | changes))  # type: ignore[arg-type]


def bigbird(seq: int) -> EncodedMask:
    blocks = seq // 64
    rows = np.arange(blocks)
    allowed = np.abs(rows[:, None] - rows[None]) <= 1
    allowed[[0, -1]] = allowed[:, [0, -1]] = True
    rng = np.random.default_rng(0)
    for row in range(blocks):
        allowed[row, rng.choice(blocks, 3, replace=False)] = True
    return encode(np.kron(allowed, np.ones((64, 64), bool))[None, None], 64, 64)


@pytest.mark.parametrize(("dim", "tile"), [(32, (192, 64)), (64, (192, 64)), (80, (128, 64)), (128, (128, 64))])
def test_hopper_groups(dim, tile):
    choice = choose(encode_bands(window(1024, 1024, 32, 32), 1024, 1024), site(dim=dim), H200)
    assert (choice.kernel, choice.tile_m, choice.tile_n) == ("block_sm90", *tile)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "fp32"}, {"softcap": 5.0}, {"bias": BiasKind.RELATIVE}, {"kv": KvKind.MASK}, {"dim": 160},
     {"scale": -1.0}, {"masked_row": MaskedRow.MEAN}, {"masked_row": MaskedRow.SCORES}],
)  # fmt: skip
def test_what_hopper_does_not_run(changes):
    mask = encode_bands(causal(256, 256), 256, 256)
    choice = choose(mask, site(**changes), H200)
    assert (choice.kernel, choice.tile_m) == ("block_sm80", 64)


def test_only_kernels_of_the_library():
    mask = encode_bands(causal(256, 256), 256, 256)
    assert choose(mask, site(), Device(90, 132, ("block_sm80",))).kernel == "block_sm80"
    assert choose(mask, site(), Device(120, 170)).kernel == "block_sm80"


def test_tall_tiles_for_long_lists_only():
    assert choose(encode_bands(causal(2048, 2048), 2048, 2048), site(), A100).tile_m == 128
    assert choose(encode_bands(window(2048, 2048, 32, 32), 2048, 2048), site(), A100).tile_m == 64
    assert choose(bigbird(2048), site(), A100).tile_m == 64


def test_global_rows_are_split_where_they_would_finish_last():
    mask = bigbird(4096)
    alone, many = choose(mask, site(1, 16, 128), A100), choose(mask, site(16, 12, 64), A100)
    assert (alone.splits > 1, alone.split_rows) == (True, 2)
    assert (many.splits, many.split_rows) == (1, 0)
    assert choose(mask, site(1, 16, 128, masked_row=MaskedRow.MEAN), A100).splits == 1


@pytest.mark.parametrize("device", [A100, H200])
def test_attributes_fit_the_arrays(device):
    lowered = lower_site(bigbird(1024), site(1, 1), device)
    a, arrays = lowered.attributes, lowered.arrays
    assert arrays["full_row_ptr"].shape == (a["mask_n_masks"], a["mask_rows"] + 1)
    assert arrays["full_row_ptr"].flat[-1] == a["mask_n_full"]
    assert arrays["part_row_ptr"].flat[-1] == a["mask_n_part"]
    assert arrays["bitmap"].size == max(1, a["mask_n_part"]) * a["tile_m"] * a["tile_n"] // 32
    lengths = np.diff(arrays["full_row_ptr"]) + np.diff(arrays["part_row_ptr"])
    assert lengths.max() == a["mask_max_row_tiles"]
