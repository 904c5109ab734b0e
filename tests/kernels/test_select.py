"""What is picked is one of the configurations that run, always the same, and the fastest by the model."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from stof_onnx.attention.types import BiasKind, KvKind, MaskedRow
from stof_onnx.errors import StofError
from stof_onnx.kernels.configs import Tilings, candidates
from stof_onnx.kernels.device_profile import profile_for
from stof_onnx.kernels.select import Device, KernelSite, choose, lower_site, predictions
from stof_onnx.mask import EncodedMask, encode, encode_bands
from stof_onnx.mask.sources import all_keys, causal, window

A100, H200 = Device(80, 108), Device(90, 132, name="NVIDIA H200")
ONLY_SM80 = Device(90, 132, ("block_sm80",), "NVIDIA H200")


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


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
def test_long_lists_of_a_full_device_take_the_hopper_kernel(dim):
    mask = encode_bands(causal(2048, 2048), 2048, 2048)
    assert choose(mask, site(dim=dim), H200).config.kernel == "block_sm90"


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "fp32"}, {"softcap": 5.0}, {"bias": BiasKind.RELATIVE}, {"kv": KvKind.MASK}, {"scale": -1.0},
     {"masked_row": MaskedRow.MEAN}, {"masked_row": MaskedRow.SCORES}],
)  # fmt: skip
def test_what_hopper_does_not_run(changes):
    mask = encode_bands(causal(256, 256), 256, 256)
    assert choose(mask, site(**changes), H200).config.kernel == "block_sm80"


@pytest.mark.parametrize("seed", range(12))
def test_picks_are_legal_and_repeat(seed):
    rng = np.random.default_rng(seed)
    options = product(
        (32, 72, 128, 256), ("fp16", "bf16", "fp32"), (0.0, 5.0), tuple(MaskedRow), tuple(BiasKind), tuple(KvKind)
    )
    every = list(options)
    seq = int(rng.integers(1, 500))
    mask = encode(rng.random((1, 2, seq, seq)) < rng.random() ** 2)
    for index in rng.permutation(len(every))[:12]:
        dim, dtype, softcap, row, bias, kv = every[index]
        wanted = site(2, 2, dim, dtype=dtype, softcap=softcap, masked_row=row, bias=bias, kv=kv)
        for device in (A100, H200, ONLY_SM80, Device(86), Device(120, 170)):
            choice = choose(mask, wanted, device)
            assert choice.config in candidates(Tilings(mask), wanted, device.arch, device.kernels)
            assert choice.config.kernel in device.kernels
            assert choose(mask, wanted, device) == choice
            times = predictions(Tilings(mask), wanted, device, profile_for(device))
            assert choice.predicted_us == min(times.values()) > 0


def test_only_kernels_of_the_library():
    mask = encode_bands(causal(256, 256), 256, 256)
    assert choose(mask, site(), ONLY_SM80).config.kernel == "block_sm80"
    with pytest.raises(StofError, match="none of block_sm90 runs this attention"):
        choose(mask, site(), Device(80, 108, ("block_sm90",)))


def test_tall_tiles_for_long_lists_only():
    long = choose(encode_bands(causal(4096, 4096), 4096, 4096), site(), ONLY_SM80)
    short = choose(encode_bands(window(4096, 4096, 64, 64), 4096, 4096), site(), ONLY_SM80)
    assert (long.config.tile_m, short.config.tile_m) == (128, 64)


def test_global_rows_are_split_where_they_would_finish_last():
    mask = bigbird(4096)
    alone, many = choose(mask, site(1, 16, 128), ONLY_SM80), choose(mask, site(64, 12, 64), ONLY_SM80)
    assert alone.config.splits > 1
    assert many.config.splits == 1
    assert choose(mask, site(1, 16, 128, masked_row=MaskedRow.MEAN), ONLY_SM80).config.splits == 1


def test_the_report_says_what_was_predicted_and_from_where():
    mask = encode_bands(causal(2048, 2048), 2048, 2048)
    measured, derived = choose(mask, site(), H200), choose(mask, site(), A100)
    assert measured.config.label in measured.reason and "block_sm80" in measured.reason and "µs" in measured.reason
    assert measured.profile.startswith("measured on an NVIDIA H200")
    assert derived.profile.startswith("derived for NVIDIA A100")


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


@pytest.mark.parametrize(
    ("mask", "tile_n"),
    [(causal(4096, 4096), 128), (all_keys(4096, 4096), 128), (window(4096, 4096, 64, 64), 64)],
    ids=["causal", "full", "window"],
)
def test_wide_hopper_tiles_for_dense_lists(mask, tile_n):
    choice = choose(encode_bands(mask, 4096, 4096), site(1, 16, 128), H200)
    assert (choice.config.kernel, choice.config.tile_n) == ("block_sm90", tile_n)
