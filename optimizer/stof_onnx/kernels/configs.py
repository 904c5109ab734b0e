"""Every configuration in which a kernel could run an attention, and a mask's arrays in the form one of them reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stof_onnx.attention.types import BiasKind, KvKind, MaskedRow
from stof_onnx.kernels.first_keys import first_key_tiles
from stof_onnx.kernels.lower_mask import MaskConfig, lower_mask
from stof_onnx.kernels.lower_sm90 import BAND, lower_grouped
from stof_onnx.mask import EncodedMask, retile
from stof_onnx.mask.encoded import I32
from stof_onnx.mask.statistics import row_tiles

KERNELS = ("row_wise", "block_sm80", "block_sm90")
SPLITS = (2, 4, 8, 16)
# A row is long when its list is longer than LONG_ROW medians and than LONG_ROW_LEAST tiles; the Hopper lowering's rule.
LONG_ROW, LONG_ROW_LEAST = 3.0, 8
_MOST_BLOCKS_TO_SPLIT = 1024  # above it every device is full without cutting all rows


@dataclass(frozen=True)
class KernelSite:
    """What a kernel must do beside the mask.

    Attributes:
        batch, heads: of Q, `batch` the expected one; kv_heads: 0 for as many as `heads`.
        dtype: "fp16", "bf16" or "fp32".
    """

    batch: int
    heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    scale: float
    softcap: float = 0.0
    bias: BiasKind = BiasKind.NONE
    kv: KvKind = KvKind.NONE
    masked_row: MaskedRow = MaskedRow.ZERO
    kv_heads: int = 0

    @property
    def plain(self) -> bool:
        """No score modifier that only the general sm_80 instances know."""
        return not (
            self.softcap
            or self.bias is not BiasKind.NONE
            or self.kv is KvKind.MASK
            or self.second_pass
            or self.scale <= 0
        )

    @property
    def second_pass(self) -> bool:
        """Rows without keys need a pass over all keys, which a split can not serve."""
        return self.masked_row in (MaskedRow.MEAN, MaskedRow.SCORES)

    @property
    def widest(self) -> int:
        """The larger head size: instances are compiled for both together."""
        return max(self.head_dim, self.v_head_dim)


@dataclass(frozen=True)
class KernelConfig:
    """One way to run: kernel family, tile, and how long rows are cut.

    Attributes:
        tile_m, tile_n: the kernel's tile; block_sm90's tile_m is 64 times the bands of a group, its tile_n 64 or 128.
        splits: pieces of a list (block_sm80).
        split_rows: leading rows of the order that are started first and, with `splits` > 1, cut; 0 with splits: all.
        split_long: block_sm90 only, whether long bands are split over the warpgroups.
    """

    kernel: str
    tile_m: int
    tile_n: int
    splits: int = 1
    split_rows: int = 0
    split_long: bool = True

    @property
    def label(self) -> str:
        """Short and unique: the key of results."""
        cut = f"/split{self.splits}" if self.splits > 1 else ""
        rows = f"/rows{self.split_rows}" if self.split_rows else ""
        return f"{self.kernel} {self.tile_m}x{self.tile_n}{cut}{rows}{'' if self.split_long else '/unsplit'}"


class Tilings:
    """One mask in the tiles asked for, each made once."""

    def __init__(self, mask: EncodedMask) -> None:
        self._portable = mask
        self._made = {(mask.tile_m, mask.tile_n): mask}
        self._first_keys: dict[tuple[int, int], npt.NDArray[np.float64]] = {}

    def get(self, tile_m: int, tile_n: int) -> EncodedMask:
        """The mask in tiles of tile_m x tile_n elements."""
        if (tile_m, tile_n) not in self._made:
            self._made[tile_m, tile_n] = retile(self._portable, tile_m, tile_n)
        return self._made[tile_m, tile_n]

    def first_keys(self, tile_m: int, tile_n: int) -> npt.NDArray[np.float64]:
        """`first_key_tiles` in these tiles."""
        if (tile_m, tile_n) not in self._first_keys:
            self._first_keys[tile_m, tile_n] = first_key_tiles(self.get(tile_m, tile_n))
        return self._first_keys[tile_m, tile_n]


def candidates(tilings: Tilings, site: KernelSite, arch: int, kernels: tuple[str, ...] = KERNELS) -> list[KernelConfig]:
    """All configurations that a library with these kernel families can run on a device of this arch.

    Args:
        tilings: of the mask.
        arch: compute capability times ten.
    """
    found = []
    if "row_wise" in kernels:
        found.append(KernelConfig("row_wise", 64, 64))
    if "block_sm80" in kernels:
        for tile_m, tile_n in sm80_tiles(site):
            found += _sm80(tilings.get(tile_m, tile_n), site)
    if "block_sm90" in kernels and hopper_runs(site, arch):
        long = bool(long_bands(tilings.get(BAND, BAND)).any())
        for tile_m, tile_n in sm90_tiles(site):
            found += [
                KernelConfig("block_sm90", tile_m, tile_n, split_long=s) for s in ((True, False) if long else (True,))
            ]
    return found


def sm80_tiles(site: KernelSite) -> tuple[tuple[int, int], ...]:
    """The tiles of cuda/src/block_exact.cuh; the general instances walk any mask tile in theirs of 64 x 32."""
    if not site.plain or site.dtype == "fp32" or site.widest > 128:
        return ((64, 32), (64, 64))
    return ((64, 32), (64, 64), (128, 64)) + (((128, 32),) if site.widest <= 64 else ())


def sm90_tiles(site: KernelSite) -> tuple[tuple[int, int], ...]:
    """The instances of cuda/src/attention_sm90.cu: rows of a group of bands, keys of a tile."""
    if site.widest <= 64:
        return ((2 * BAND, BAND), (3 * BAND, BAND))
    return ((2 * BAND, BAND), (2 * BAND, 2 * BAND)) if site.widest <= 128 else ((2 * BAND, BAND),)


def hopper_runs(site: KernelSite, arch: int) -> bool:
    """Whether the Hopper kernel has an instance for the site."""
    return arch == 90 and site.dtype in ("fp16", "bf16") and site.widest <= 256 and site.plain


def long_bands(mask: EncodedMask, ratio: float = LONG_ROW) -> npt.NDArray[np.bool_]:
    """Which row tiles of each distinct mask are long, in its own tiles: bool [n_masks, rows]."""
    lengths = row_tiles(mask)
    with np.errstate(invalid="ignore"):
        limit = np.fmax(LONG_ROW_LEAST, ratio * np.median(lengths, axis=1, keepdims=True))
    return np.asarray(lengths > limit, np.bool_)


def _sm80(tiled: EncodedMask, site: KernelSite) -> list[KernelConfig]:
    tile_m, tile_n = tiled.tile_m, tiled.tile_n
    long, longest = int(long_bands(tiled).sum(axis=1).max()), int(row_tiles(tiled).max())
    found = [KernelConfig("block_sm80", tile_m, tile_n)]
    if long:
        found.append(KernelConfig("block_sm80", tile_m, tile_n, 1, long))
    few = site.batch * site.heads * tiled.rows <= _MOST_BLOCKS_TO_SPLIT
    for splits in SPLITS if not site.second_pass else ():
        if longest < 2 * splits:
            break
        if long:
            found.append(KernelConfig("block_sm80", tile_m, tile_n, splits, long))
        if few:
            found.append(KernelConfig("block_sm80", tile_m, tile_n, splits))
    return found


def lower(mask: EncodedMask, config: KernelConfig, where: str = "mask") -> tuple[dict[str, I32], dict[str, int | str]]:
    """The seven mask arrays as the configuration reads them, and the plugin node's attributes that go with them.

    Raises:
        StofError: arrays that do not follow the mask format.
    """
    attributes: dict[str, int | str] = {
        "kernel": config.kernel,
        "splits": config.splits,
        "split_rows": config.split_rows,
        "f32_math": "ffma",
    }
    if config.kernel == "block_sm90":
        ratio = LONG_ROW if config.split_long else float("inf")
        grouped = lower_grouped(mask, config.tile_m // BAND, ratio, where, config.tile_n)
        return grouped.arrays, attributes | {
            "tile_m": config.tile_m,
            "tile_n": config.tile_n,
            "mask_seq_q": mask.s_q,
            "mask_seq_kv": mask.s_kv,
            "mask_fragment_order": 1,
            "mask_n_masks": grouped.n_masks,
            "mask_rows": grouped.groups,
            "mask_cols": grouped.cols,
            "mask_n_full": grouped.n_full,
            "mask_n_part": grouped.n_part,
            "mask_max_row_tiles": grouped.max_group_tiles,
            "split_rows": grouped.split_groups,
        }
    fragments = config.kernel == "block_sm80"
    lowered = lower_mask(mask, MaskConfig(config.tile_m, config.tile_n, fragment_order=fragments), where)
    return lowered.to_onnx_arrays(), attributes | lowered.attributes()
