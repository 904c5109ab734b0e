"""What a launch must know of a mask and can not read from device memory without synchronising."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from stof_onnx.mask import EncodedMask
from stof_onnx.mask.statistics import row_tiles


@dataclass(frozen=True)
class LaunchStats:
    """Counts over all distinct masks of a node, and maxima over their row tiles.

    All are upper bounds for a launch at a sequence shorter than the one encoded.

    Attributes:
        n_masks: distinct masks.
        rows, cols: row and column tiles of one mask.
        n_full, n_part: listed tiles of all masks.
        total_tiles: n_masks * rows * cols, the tiles a dense kernel would visit.
        max_row_tiles: longest full + part list of a row tile; max_row_full and max_row_part: of each kind alone.
        empty_rows: row tiles that list nothing.
    """

    n_masks: int
    rows: int
    cols: int
    n_full: int
    n_part: int
    total_tiles: int
    max_row_tiles: int
    max_row_full: int
    max_row_part: int
    empty_rows: int

    def attributes(self) -> dict[str, int]:
        """Attributes of the plugin node: each figure under its name with the prefix `mask_`."""
        return {f"mask_{name}": value for name, value in asdict(self).items()}


def launch_stats(mask: EncodedMask) -> LaunchStats:
    """The launch figures of `mask` in its own tiles."""
    listed = row_tiles(mask)
    return LaunchStats(
        n_masks=mask.n_masks,
        rows=mask.rows,
        cols=mask.cols,
        n_full=mask.n_full,
        n_part=mask.n_part,
        total_tiles=mask.n_masks * mask.rows * mask.cols,
        max_row_tiles=int(listed.max()),
        max_row_full=int(np.diff(mask.full_row_ptr, axis=1).max()),
        max_row_part=int(np.diff(mask.part_row_ptr, axis=1).max()),
        empty_rows=int((listed == 0).sum()),
    )


def row_work(mask: EncodedMask, full_weight: float = 1.0, part_weight: float = 1.0) -> npt.NDArray[np.float64]:
    """Weighted length of every row tile's lists: float64 [n_masks, rows]."""
    full, part = np.diff(mask.full_row_ptr, axis=1), np.diff(mask.part_row_ptr, axis=1)
    return full_weight * full + part_weight * part
