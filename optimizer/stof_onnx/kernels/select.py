"""Which kernel runs an attention, in which tiles: plain rules from mask statistics, shapes, dtype and device.

The rules, in order, with the measurement behind each (one H200, fp16, benchmarks of cuda/):
1. `block_sm90` (compute capability 9.0 only) wherever it runs: fp16 or bf16, head sizes up to 128, no bias, no softcap,
   no run-time key mask, rows without keys zero or NaN. It beat the sm_80 kernels on every mask. Groups of 3 bands of 64
   rows for head sizes up to 64 (18-30 % over 2 bands), of 2 above (the only one there is).
2. Else `block_sm80`, bitmaps in fragment order (2-20 % over tile order). Tiles of 128 x 64 where they list at most 8 %
   more 64-row tiles than 64 x 64 would (dense, causal from about S = 1024, random masks: 5-15 % faster), else 64 x 64,
   whose shorter lists win on every sparse mask. What only the general instances run (bias, softcap, key masks, rows
   with a meaning of their own, fp32) takes 64 x 64.
3. Lists are split over the keys (sm_80) only where the longest one takes longer than an even share of all work on one
   of the places a device has: global rows at a small batch (BigBird, 1 x 16 x 16384: 356 us instead of 600). Then only
   the rows that are more than 3 times as long as the median are split, if there are any.
The row-wise kernel is never chosen: it won nowhere and tied only at S = 128 and batch 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stof_onnx.kernels.configs import LONG_ROW, LONG_ROW_LEAST, KernelConfig, KernelSite, lower
from stof_onnx.kernels.lower_sm90 import BAND
from stof_onnx.mask import EncodedMask, retile
from stof_onnx.mask.encoded import I32
from stof_onnx.mask.statistics import row_tiles

__all__ = ["KERNELS", "Device", "KernelChoice", "KernelSite", "LoweredSite", "choose", "lower_site"]
KERNELS = ("block_sm80", "block_sm90")
_MULTIPROCESSORS = {80: 108, 86: 84, 87: 16, 89: 128, 90: 132}
_BLOCKS_PER_SM = 2  # resident blocks of the sm_80 kernels
_TALL_TILE_EXCESS = 1.08
_MOST_SPLITS = 16


@dataclass(frozen=True)
class Device:
    """What kernels are chosen for.

    Attributes:
        arch: compute capability times ten (90: H100, H200).
        multiprocessors: 0 takes the count of the arch's largest part.
        kernels: kernel families that the plugin library holds.
    """

    arch: int = 90
    multiprocessors: int = 0
    kernels: tuple[str, ...] = KERNELS

    @property
    def slots(self) -> int:
        """Row tiles that run at once."""
        return (self.multiprocessors or _MULTIPROCESSORS.get(self.arch, 108)) * _BLOCKS_PER_SM


@dataclass(frozen=True)
class KernelChoice:
    """A kernel and its configuration; `reason` is for the report."""

    kernel: str
    tile_m: int
    tile_n: int
    splits: int
    split_rows: int
    reason: str


@dataclass(frozen=True)
class LoweredSite:
    """The seven mask arrays as the chosen kernel reads them, and the plugin node's attributes that go with them."""

    choice: KernelChoice
    arrays: dict[str, I32]
    attributes: dict[str, int | str]


def choose(mask: EncodedMask, site: KernelSite, device: Device) -> KernelChoice:
    """The kernel for one attention. `mask` may be in any tiles."""
    if _hopper_runs(site, device):
        bands = 3 if max(site.head_dim, site.v_head_dim) <= 64 else 2
        return KernelChoice("block_sm90", BAND * bands, BAND, 1, 0, f"sm_90, groups of {bands} bands")
    square = retile(mask, 64, 64)
    tile_m = 64
    reason = "64 x 64: short lists"
    if not site.plain or site.dtype == "fp32":
        reason = "64 x 64: general instance"
    else:
        tall = retile(mask, 128, 64)
        if 2 * _listed(tall) <= _TALL_TILE_EXCESS * _listed(square):
            tile_m, square, reason = 128, tall, "128 x 64: long lists"
    splits, split_rows = _splits(square, site, device)
    if splits > 1:
        reason += f", {split_rows or 'all'} rows split in {splits}"
    return KernelChoice("block_sm80", tile_m, 64, splits, split_rows, reason)


def lower_site(mask: EncodedMask, site: KernelSite, device: Device, where: str = "mask") -> LoweredSite:
    """Chooses the kernel and brings the mask into its form.

    Raises:
        StofError: arrays that do not follow the mask format.
    """
    mask.validate(where)
    choice = choose(mask, site, device)
    config = KernelConfig(choice.kernel, choice.tile_m, choice.tile_n, choice.splits, choice.split_rows)
    arrays, attributes = lower(mask, config, where)
    return LoweredSite(choice, arrays, attributes)


def _hopper_runs(site: KernelSite, device: Device) -> bool:
    small = max(site.head_dim, site.v_head_dim) <= 128
    return (
        device.arch == 90 and "block_sm90" in device.kernels and site.dtype in ("fp16", "bf16") and small and site.plain
    )


def _listed(mask: EncodedMask) -> int:
    return mask.n_full + mask.n_part


def _splits(mask: EncodedMask, site: KernelSite, device: Device) -> tuple[int, int]:
    """(splits, split_rows): see rule 3. A split can not serve rows whose empty result needs a second pass."""
    if site.second_pass:
        return 1, 0
    lengths = row_tiles(mask)
    share = lengths.sum() / mask.n_masks * site.batch * site.heads / device.slots
    longest = int(lengths.max())
    if longest <= max(share, LONG_ROW_LEAST):
        return 1, 0
    splits = 2
    while splits < _MOST_SPLITS and longest > splits * max(share, LONG_ROW_LEAST):
        splits *= 2
    limit = max(float(LONG_ROW_LEAST), LONG_ROW * float(np.median(lengths)))
    return splits, int((lengths > limit).sum(axis=1).max())
