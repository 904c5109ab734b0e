"""What a configuration makes a kernel do with a mask: work items and their steps, bytes, joins. Counts, no times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stof_onnx.kernels.configs import LONG_ROW, KernelConfig, KernelSite, Tilings, long_bands
from stof_onnx.kernels.instances import Instance, instance_of
from stof_onnx.kernels.lower_sm90 import BAND
from stof_onnx.mask import EncodedMask
from stof_onnx.mask.statistics import tile_allowed

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    """What the mask does not change.

    Attributes:
        heads: batch times heads.
        head_bytes: K and V, for each of `heads` (heads of a GQA group share them).
        io_bytes: Q, K, V and O once.
    """

    heads: int
    head_bytes: float
    io_bytes: float

    @classmethod
    def of(cls, mask: EncodedMask, site: KernelSite) -> Sizes:
        """The sizes of a site at the mask's sequence lengths."""
        per_row = (4.0 if site.dtype == "fp32" else 2.0) * (site.head_dim + site.v_head_dim)
        heads = site.batch * site.heads
        head_bytes = per_row * mask.s_kv * (site.kv_heads or site.heads) / site.heads
        return cls(heads, head_bytes, heads * (per_row * mask.s_q + head_bytes))


@dataclass(frozen=True)
class Work:
    """The work items of a launch, alike ones counted once. Arrays are float64 [items].

    A step is one tile of the kernel (for the row-wise kernel 64 keys that a row reads, and 64 columns that it scans).

    Attributes:
        instance: the kernel.
        sizes: of the tensors.
        count: how many items are alike, over batch and heads.
        full, part: steps of an item, over all its warpgroups.
        longest_full, longest_part: of its slowest warpgroup: what has to follow one after the other.
        first_keys: steps in which a query sees its first key (`first_key_tiles`).
        entries: tiles that are loaded for several warpgroups; 0 where each item has one list.
        pieces: row tiles or bands whose start and end an item pays for.
        early: items of the leading rows, which all heads start first.
        joined: pieces of a split row that a second launch joins; 0 where there is none.
        joined_bytes: partial results of split rows.
        counter: the launch clears a counter first.
    """

    instance: Instance
    sizes: Sizes
    count: F64
    full: F64
    part: F64
    longest_full: F64
    longest_part: F64
    first_keys: F64
    entries: F64
    pieces: F64
    early: npt.NDArray[np.bool_]
    joined: int = 0
    joined_bytes: float = 0.0
    counter: bool = False

    @cached_property
    def items(self) -> float:
        """How many work items there are."""
        return float(self.count.sum())


def work_of(tilings: Tilings, config: KernelConfig, site: KernelSite) -> Work:
    """The work of one attention in one configuration.

    Args:
        tilings: of the mask.
        config: one that can run (`configs.candidates`).
    """
    instance = instance_of(config, site)
    if config.kernel == "row_wise":
        return _row_wise(tilings, site, instance)
    if config.kernel == "block_sm90":
        return _sm90(tilings, config, site, instance)
    return _sm80(tilings, config, site, instance)


def _sm80(tilings: Tilings, config: KernelConfig, site: KernelSite, instance: Instance) -> Work:
    mask = tilings.get(config.tile_m, config.tile_n)
    down, across = config.tile_m // instance.rows, config.tile_n // instance.cols
    full, part = (np.diff(p, axis=1).astype(np.float64) for p in (mask.full_row_ptr, mask.part_row_ptr))
    order = np.argsort(-(full + part), axis=1, kind="stable")
    full, part = (np.take_along_axis(x, order, axis=1) for x in (full, part))
    named = config.split_rows or (mask.rows if config.splits > 1 else 0)
    early = np.zeros(full.shape, np.bool_)
    early[:, :named] = True
    pieces = np.where(early, float(config.splits), 1.0)
    length = full + part
    share = np.ceil(length / pieces) / np.maximum(length, 1.0)  # of the list in the longest piece
    per_mask = _uses(mask, site)[:, None] * down
    first_keys = np.take_along_axis(tilings.first_keys(config.tile_m, config.tile_n), order, axis=1)
    joined = per_mask.sum() * named * config.splits * instance.rows * (site.v_head_dim + 2) * 4.0
    return Work(
        instance=instance,
        sizes=Sizes.of(mask, site),
        count=(pieces * per_mask).ravel(),
        full=(full * across / pieces).ravel(),
        part=(part * across / pieces).ravel(),
        longest_full=(full * across * share).ravel(),
        longest_part=(part * across * share).ravel(),
        first_keys=(first_keys * across / pieces).ravel(),
        entries=np.zeros(full.size),
        pieces=np.ones(full.size),
        early=early.ravel(),
        joined=config.splits if config.splits > 1 else 0,
        joined_bytes=joined if config.splits > 1 else 0.0,
    )


def _row_wise(tilings: Tilings, site: KernelSite, instance: Instance) -> Work:
    mask = tilings.get(BAND, BAND)
    keys = np.stack([tile_allowed(mask, m).sum(axis=1) for m in range(mask.n_masks)]) / BAND
    scanned = (np.diff(mask.full_row_ptr, axis=1) + np.diff(mask.part_row_ptr, axis=1)).astype(np.float64)
    count = np.broadcast_to(_uses(mask, site)[:, None] * (BAND // instance.rows), keys.shape).ravel()
    keys, scanned = keys.ravel() / BAND, scanned.ravel()
    none, early = np.zeros(keys.size), np.zeros(keys.size, np.bool_)
    return Work(instance, Sizes.of(mask, site), count, keys, scanned, keys, scanned, none, none, none + 1, early)


def _sm90(tilings: Tilings, config: KernelConfig, site: KernelSite, instance: Instance) -> Work:
    mask, bands = tilings.get(BAND, config.tile_n), config.tile_m // BAND
    ratio = LONG_ROW if config.split_long else float("inf")
    first_keys = tilings.first_keys(BAND, config.tile_n)
    groups = [_Groups.of(mask, m, bands, ratio, first_keys[m]) for m in range(mask.n_masks)]
    uses = _uses(mask, site)
    entries = np.concatenate([g.entries for g in groups])
    per_mask = sum(float(g.entries.sum()) for g in groups) / mask.n_masks
    longest = float(entries.max(initial=0.0))
    rows = max(len(g.entries) for g in groups)
    uneven = 4 * longest * rows > 5 * per_mask

    def joined(name: str) -> F64:
        return np.concatenate([getattr(g, name) for g in groups])

    return Work(
        instance=instance,
        sizes=Sizes.of(mask, site),
        count=np.concatenate([np.full(len(g.entries), n) for g, n in zip(groups, uses, strict=True)]),
        full=joined("full"),
        part=joined("part"),
        longest_full=joined("longest_full"),
        longest_part=joined("longest_part"),
        first_keys=joined("first_keys"),
        entries=joined("entries"),
        pieces=joined("pieces"),
        early=joined("early").astype(np.bool_),
        counter=uneven,
    )


@dataclass(frozen=True)
class _Groups:
    """Row groups of one mask as `lower_sm90` makes them, as arrays over the groups."""

    entries: F64
    full: F64
    part: F64
    longest_full: F64
    longest_part: F64
    first_keys: F64
    pieces: F64
    early: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, mask: EncodedMask, number: int, bands: int, ratio: float, first_keys: F64) -> _Groups:
        codes = _codes(mask, number)
        full, part = (codes == 1).sum(axis=1).astype(np.float64), (codes == 2).sum(axis=1).astype(np.float64)
        long = long_bands(mask, ratio)[number]
        starts, sizes = _group_starts(long, bands)
        join = np.maximum.reduceat(codes != 0, starts, axis=0).sum(axis=1).astype(np.float64)
        total_full, total_part = np.add.reduceat(full, starts), np.add.reduceat(part, starts)
        # The slowest band: its list is the longest.
        slowest = np.maximum.reduceat(full + part, starts)
        share = slowest / np.maximum(total_full + total_part, 1.0)
        split = long[starts]
        share[split] = np.ceil(slowest[split] / bands) / np.maximum(slowest[split], 1.0)
        pieces = np.where(split, bands, sizes).astype(np.float64)
        longest_full, longest_part = total_full * share, total_part * share
        first_keys = np.add.reduceat(first_keys, starts)
        return cls(join, total_full, total_part, longest_full, longest_part, first_keys, pieces, split)


def _codes(mask: EncodedMask, number: int) -> npt.NDArray[np.int8]:
    codes = np.zeros((mask.rows, mask.cols), np.int8)
    for code, pointers, columns in (
        (1, mask.full_row_ptr, mask.full_col_idx),
        (2, mask.part_row_ptr, mask.part_col_idx),
    ):
        rows = np.repeat(np.arange(mask.rows), np.diff(pointers[number]))
        codes[rows, columns[pointers[number, 0] : pointers[number, -1]]] = code
    return codes


def _group_starts(long: npt.NDArray[np.bool_], bands: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First band and size of every group: long bands alone, the others up to `bands` neighbours together."""
    starts, band = [], 0
    while band < len(long):
        starts.append(band)
        size = 1
        while not long[band] and size < bands and band + size < len(long) and not long[band + size]:
            size += 1
        band += size
    first = np.array(starts, np.int64)
    return first, np.diff(np.append(first, len(long)))


def _uses(mask: EncodedMask, site: KernelSite) -> F64:
    """How many heads of the whole batch use each distinct mask."""
    share = np.bincount(mask.mask_index.ravel(), minlength=mask.n_masks) / mask.mask_index.size
    return np.asarray(share * site.batch * site.heads, np.float64)
