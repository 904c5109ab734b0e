"""What a launch must know of a mask and can not read from device memory without synchronising."""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from stof_onnx.errors import StofError
from stof_onnx.mask import EncodedMask
from stof_onnx.mask.statistics import row_tiles

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_MOST_PIECES = 1 << 14  # above it every slot gets many pieces, and the mean work a slot is close enough


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


def suggest_splits(
    mask: EncodedMask,
    batch: int,
    heads: int,
    slots: int,
    split_cost: float = 1.0,
    max_splits: int = 32,
) -> int:
    """Into how many pieces along the keys a kernel that runs longest rows first should cut every row tile.

    With s pieces a row of n tiles is cut into pieces of ceil(n/s) tiles (the last may be shorter), each with
    `split_cost` tiles of extra work (its partial result is written and combined). Each candidate s is played through:
    the next longest piece goes to the slot that is free first. The smallest s within 5 % of the best is taken, since
    splitting also costs workspace.

    Args:
        mask: in the kernel's tiles.
        batch, heads: of Q.
        slots: row tiles that run at once: SMs times resident blocks (times row tiles a block).
        split_cost: extra work of a piece, in tiles.
        max_splits: the most pieces a kernel supports.

    Returns:
        1 (no split) to max_splits.

    Raises:
        StofError: `mask_index` does not broadcast to [batch, heads].
    """
    lengths = _row_tiles_of_grid(mask, batch, heads)
    most = max(1, min(max_splits, int(lengths.max())))
    candidates = [s for s in _SPLITS if s < most] + [most]
    times = [_run_time(lengths, s, split_cost if s > 1 else 0.0, slots) for s in candidates]
    good = 1.05 * min(times)
    return next(s for s, time in zip(candidates, times, strict=True) if time <= good)


def _run_time(lengths: npt.NDArray[np.int64], splits: int, cost: float, slots: int) -> float:
    """When the last of `slots` slots is done, in tiles, if the longest pieces are handed out first."""
    per_piece = -(-lengths // splits)
    whole, rest = np.divmod(lengths, np.maximum(per_piece, 1))
    pieces = np.concatenate([np.repeat(per_piece, whole), rest[rest > 0]]) + cost
    if len(pieces) > _MOST_PIECES:
        return max(float(pieces.sum()) / slots, float(pieces.max()))
    done = [0.0] * slots
    for piece in np.sort(pieces)[::-1].tolist():
        heapq.heapreplace(done, done[0] + piece)
    return max(done)


def _row_tiles_of_grid(mask: EncodedMask, batch: int, heads: int) -> npt.NDArray[np.int64]:
    """Listed tiles of every row tile of every batch entry and head."""
    for axis, size in enumerate((batch, heads)):
        if mask.mask_index.shape[axis] not in (1, size):
            raise StofError(
                f"mask_index of shape {list(mask.mask_index.shape)} does not fit batch {batch} and {heads} heads",
                "mask",
            )
    index = np.broadcast_to(mask.mask_index, (batch, heads))
    return row_tiles(mask)[index].ravel()
