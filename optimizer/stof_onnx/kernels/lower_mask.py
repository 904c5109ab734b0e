"""Lowering of a mask, offline on the host: from the portable arrays to those of one kernel configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stof_onnx.kernels.fragments import fragment_words
from stof_onnx.kernels.stats import LaunchStats, launch_stats, row_work
from stof_onnx.mask import EncodedMask, retile
from stof_onnx.mask.encoded import I32
from stof_onnx.mask.tiles import order_by_work


@dataclass(frozen=True)
class MaskConfig:
    """What a kernel configuration wants of the mask.

    Attributes:
        tile_m, tile_n: its tile in elements, multiples of 8.
        fragment_order: bitmaps as `kernels.fragments` orders them (tile_m a multiple of 16, tile_n of 64, or 32).
        full_weight, part_weight: what a full and a part tile cost, for the order of the rows; only their ratio counts.
    """

    tile_m: int
    tile_n: int
    fragment_order: bool = False
    full_weight: float = 1.0
    part_weight: float = 1.0


@dataclass(frozen=True)
class LoweredMask:
    """A mask as one kernel configuration reads it.

    Attributes:
        config: what was asked for.
        mask: re-tiled, rows ordered by the configuration's weights.
        fragments: what `fragment_words` gives, in place of the bitmap, or None.
        stats: launch figures in these tiles.
    """

    config: MaskConfig
    mask: EncodedMask
    fragments: npt.NDArray[np.uint32] | None
    stats: LaunchStats

    def to_onnx_arrays(self) -> dict[str, I32]:
        """The plugin node's initializers: as `EncodedMask.to_onnx_arrays`, the bitmap in the order asked for.

        Fragments are int32 [n_part or 1, ...] in the shape of `fragment_words`.
        """
        arrays = self.mask.to_onnx_arrays()
        if self.fragments is not None:
            words = self.fragments.view(np.int32)
            arrays["bitmap"] = words if words.size else np.zeros((1, *words.shape[1:]), np.int32)
        return arrays

    def attributes(self) -> dict[str, int]:
        """The plugin node's integer attributes that describe the mask."""
        return {
            "tile_m": self.mask.tile_m,
            "tile_n": self.mask.tile_n,
            "mask_seq_q": self.mask.s_q,
            "mask_seq_kv": self.mask.s_kv,
            "mask_fragment_order": int(self.fragments is not None),
            **self.stats.attributes(),
        }


def lower_mask(mask: EncodedMask, config: MaskConfig, where: str = "mask") -> LoweredMask:
    """Validates every array, re-tiles, orders the rows by falling work, repacks the bitmap where wanted, counts.

    Args:
        mask: as read from the portable file, or encoded just now.
        config: the kernel configuration's wishes.
        where: the node, for messages.

    Raises:
        StofError: arrays that do not follow the format, or a tile shape that the configuration can not have.
    """
    mask.validate(where)
    tiled = retile(mask, config.tile_m, config.tile_n)
    tiled = replace(tiled, row_order=order_by_work(row_work(tiled, config.full_weight, config.part_weight)))
    fragments = fragment_words(tiled.bitmap) if config.fragment_order else None
    return LoweredMask(config, tiled, fragments, launch_stats(tiled))
