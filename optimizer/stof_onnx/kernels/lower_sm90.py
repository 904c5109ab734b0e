"""Lowering of a mask for the Hopper kernel: groups of 64-row bands that share their key tiles.

A group is up to `bands` neighbouring bands (one a warpgroup) with the union of their lists of tiles, 64 rows by 64 or
128 keys, so each tile is loaded once for all of them. A band whose list is much longer than the others' (a global row)
becomes a *split* group of its own: all warpgroups take its tiles in turn. Arrays keep the names of docs/mask_format.md,
with groups for rows:

    row_order[m, g]    first band | number of bands << 20 | split << 23 | even << 24 (a full group whose tiles all count
                       for every band); groups lie in the order in which to run them
    full_col_idx       key tiles that are full for every band of the group
    part_col_idx       key tile | code of band i << (24 + 2 i); codes: 0 empty, 1 full, 2 part
    bitmap             uint32 [n_part or 1, bands, 4, keys/64, 32], fragment order; only the words of part bands matter
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stof_onnx.errors import StofError
from stof_onnx.kernels.fragments import fragment_words
from stof_onnx.mask import EncodedMask, retile
from stof_onnx.mask.encoded import I32

BAND = 64
_CODE_SHIFT = 24
_SPLIT = 1 << 23


@dataclass(frozen=True)
class GroupedMask:
    """A mask as the Hopper kernel reads it.

    Attributes:
        arrays: the seven int32 arrays by input name; none is zero-sized.
        bands: bands of a full group (warpgroups of the kernel); its tile is 64*bands x keys.
        keys: width of a key tile.
        n_masks, groups, cols: sizes; `groups` is the longest mask's, the others end in empty groups.
        n_full, n_part: listed entries.
        split_groups: leading groups of every mask that are split.
        max_group_tiles: longest list.
    """

    arrays: dict[str, I32]
    bands: int
    keys: int
    n_masks: int
    groups: int
    cols: int
    n_full: int
    n_part: int
    split_groups: int
    max_group_tiles: int


def lower_grouped(
    mask: EncodedMask, bands: int, split_ratio: float = 3.0, where: str = "mask", keys: int = BAND
) -> GroupedMask:
    """Groups the bands of every distinct mask.

    Args:
        mask: in any tiles.
        bands: 2 or 3: warpgroups of the kernel.
        split_ratio: a band is split when its list is more than this many times as long as its mask's median, and
            longer than 8.
        where: the node, for messages.
        keys: width of a key tile: 64 or 128.

    Raises:
        StofError: arrays that do not follow the format, or a mask too large for the packed entries.
    """
    mask.validate(where)
    tiled = retile(mask, BAND, keys)
    if tiled.cols >= 1 << _CODE_SHIFT or tiled.rows >= 1 << 20:
        raise StofError(f"the mask of {mask.s_q} x {mask.s_kv} has too many tiles", where)
    words = fragment_words(tiled.bitmap).reshape(-1, 4, keys // BAND, 32)
    splits = [_long_bands(tiled, m, split_ratio) for m in range(tiled.n_masks)]
    # Split groups lead, and every mask has as many: a mask with fewer has empty ones in their place.
    split_groups = max(len(s) for s in splits)
    per_mask = [_group_mask(tiled, m, bands, splits[m]) for m in range(tiled.n_masks)]
    plain_groups = max(len(plain) for _, plain in per_mask)
    empty = _Group(0, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, bands), np.int64))
    order, full, part, sources = [], [], [], []
    for split, plain in per_mask:
        padded = split + [empty] * (split_groups - len(split)) + plain + [empty] * (plain_groups - len(plain))
        order.append([g.order for g in padded])
        full.append([g.full for g in padded])
        part.append([g.part for g in padded])
        sources += [g.sources for g in padded]
    source = np.concatenate(sources) if sources else np.zeros((0, bands), np.int64)
    bitmap = np.zeros((max(1, len(source)), bands, 4, keys // BAND, 32), np.uint32)
    filled = source >= 0
    bitmap[: len(source)][filled] = words[source[filled]]
    full_ptr, full_idx = _pack(full)
    part_ptr, part_idx = _pack(part)
    arrays = {
        "full_row_ptr": full_ptr,
        "full_col_idx": full_idx if full_idx.size else np.zeros(1, np.int32),
        "part_row_ptr": part_ptr,
        "part_col_idx": part_idx if part_idx.size else np.zeros(1, np.int32),
        "bitmap": bitmap.view(np.int32),
        "row_order": np.array(order, np.int32),
        "mask_index": mask.mask_index,
    }
    listed = np.diff(full_ptr, axis=1) + np.diff(part_ptr, axis=1)
    return GroupedMask(
        arrays=arrays,
        bands=bands,
        keys=keys,
        n_masks=tiled.n_masks,
        groups=split_groups + plain_groups,
        cols=tiled.cols,
        n_full=int(full_idx.size),
        n_part=int(part_idx.size),
        split_groups=split_groups,
        max_group_tiles=int(listed.max()),
    )


@dataclass(frozen=True)
class _Group:
    order: int
    full: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]  # [part entries, bands]: which part tile of the encoded mask, or -1

    @property
    def length(self) -> int:
        return len(self.full) + len(self.part)


def _band_lists(mask: EncodedMask, number: int, band: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Columns of the full and part tiles of one band, and the index of its first part tile."""
    full = mask.full_col_idx[mask.full_row_ptr[number, band] : mask.full_row_ptr[number, band + 1]]
    first = int(mask.part_row_ptr[number, band])
    part = mask.part_col_idx[first : mask.part_row_ptr[number, band + 1]]
    return full.astype(np.int64), part.astype(np.int64), first


def _long_bands(mask: EncodedMask, number: int, ratio: float) -> list[int]:
    lengths = np.diff(mask.full_row_ptr[number]) + np.diff(mask.part_row_ptr[number])
    limit = max(8.0, ratio * float(np.median(lengths)))
    return [int(band) for band in np.flatnonzero(lengths > limit)]


def _group_mask(mask: EncodedMask, number: int, bands: int, split: list[int]) -> tuple[list[_Group], list[_Group]]:
    """The split groups and the others of one mask, each by falling length."""
    long = set(split)
    split_groups, plain = [], []
    for band in split:
        full, part, first = _band_lists(mask, number, band)
        sources = np.full((len(part), bands), -1, np.int64)
        sources[:, 0] = first + np.arange(len(part))
        split_groups.append(_Group(band | 1 << 20 | _SPLIT, full, part | 2 << _CODE_SHIFT, sources))
    band = 0
    while band < mask.rows:
        if band in long:
            band += 1
            continue
        count = 1
        while count < bands and band + count < mask.rows and band + count not in long:
            count += 1
        plain.append(_join(mask, number, band, count, bands))
        band += count
    return sorted(split_groups, key=lambda g: -g.length), sorted(plain, key=lambda g: -g.length)


def _join(mask: EncodedMask, number: int, band: int, count: int, bands: int) -> _Group:
    codes = np.zeros((bands, mask.cols), np.int64)
    sources = np.full((bands, mask.cols), -1, np.int64)
    for i in range(count):
        full, part, first = _band_lists(mask, number, band + i)
        codes[i, full] = 1
        codes[i, part] = 2
        sources[i, part] = first + np.arange(len(part))
    all_full = (codes[:count] == 1).all(axis=0)
    listed = np.flatnonzero((codes != 0).any(axis=0) & ~all_full)
    packed = listed.copy()
    for i in range(bands):
        packed |= codes[i, listed] << (_CODE_SHIFT + 2 * i)
    even = count == bands and bool((codes[:, listed] != 0).all())
    return _Group(band | count << 20 | even << 24, np.flatnonzero(all_full), packed, sources[:, listed].T)


def _pack(lists: list[list[npt.NDArray[np.int64]]]) -> tuple[I32, I32]:
    """Absolute row pointers [n_masks, groups + 1] and the concatenated entries."""
    lengths = np.array([[len(entries) for entries in row] for row in lists], np.int64)
    ends = np.cumsum(lengths.ravel()).reshape(lengths.shape)
    starts = np.concatenate([[0], ends.ravel()])[:-1].reshape(lengths.shape)
    pointers = np.concatenate([starts[:, :1], ends], axis=1)
    entries = [e for row in lists for e in row]
    return pointers.astype(np.int32), np.concatenate(entries).astype(np.int32)
