"""How long a launch takes: work items, steps and bytes times a device's coefficients. Arithmetic only, nothing is run.

An item of a kernel has two lengths: `alone`, what it takes on an idle multiprocessor (steps follow one another), and
`shared`, what it takes from a busy one's throughput. k items at once need softer_max(alone, k * shared); a
multiprocessor that holds r at once takes more than r in waves.

A launch lasts as long as its busiest multiprocessor. Items start longest first, so of n multiprocessors some one gets
m + 1 items that are at least as long as the (m n + 1)-th longest (`busiest`); with much to do it works the mean and
part of a last item. Heads are taken in chunks whose K and V stay in the cache, so the end of a launch is that of its
last chunk. A persistent kernel deals lists of about one length out in turn. Tensors read and written once set a floor,
`io`; split rows cost a second launch to join them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stof_onnx.kernels.work import F64, Work

_CACHED_SHARE = {"block_sm80": 0.75, "block_sm90": 0.48, "row_wise": 1.0}  # of the L2 that a chunk of heads fills


@dataclass(frozen=True)
class Figures:
    """What the model knows of a device.

    Attributes:
        multiprocessors: how many there are.
        cache_bytes: of the L2.
        shared_bytes: shared memory of a multiprocessor.
    """

    multiprocessors: float
    cache_bytes: float
    shared_bytes: float


@dataclass(frozen=True)
class Coefficients:
    """Times of one kernel instance on one device, all positive.

    Attributes:
        launch: µs of a launch beside its items.
        alone_full, alone_part: µs of a full and of a part step for an item that has a multiprocessor to itself.
        alone_item: µs of its start and end.
        shared_full, shared_part, shared_piece: µs that a step, and the start and end of a row tile, take from a
            multiprocessor's throughput.
        alone_entry, shared_entry: µs of a tile that is loaded for several warpgroups.
        alone_first, shared_first: µs that a step takes longer in which a query sees its first key.
        sharpness: of the softer maxima, their p-norm's exponent; no time.
        tail: share of a last item that the busiest multiprocessor works longer than the mean.
        io: µs a megabyte of tensors.
        join, join_bytes: µs of the second launch of split rows, and a megabyte of partial results.
        join_piece: µs for each piece of a split row, whether a second launch joins them or the block itself.
        counter: µs of clearing the counter of items.
    """

    launch: float
    alone_full: float
    alone_part: float
    alone_item: float
    shared_full: float
    shared_part: float
    shared_piece: float
    alone_entry: float
    shared_entry: float
    alone_first: float
    shared_first: float
    sharpness: float
    tail: float
    io: float
    join: float
    join_bytes: float
    join_piece: float
    counter: float


NAMES = tuple(f.name for f in fields(Coefficients))


def predict_us(work: Work, c: Coefficients, device: Figures) -> float:
    """Microseconds of a call."""
    persistent = _persistent(work)
    depth = (work.longest_full + work.longest_part) / np.maximum(work.full + work.part, 1e-9)
    alone = c.alone_full * work.longest_full + c.alone_part * work.longest_part
    alone = alone + c.alone_entry * work.entries + c.alone_first * work.first_keys * depth
    shared = c.shared_full * work.full + c.shared_part * work.part + c.shared_piece * work.pieces
    shared = shared + c.shared_entry * work.entries + c.shared_first * work.first_keys
    if persistent:
        joining = c.join_piece * np.where(work.early, work.pieces, 0.0)
        alone, shared = alone + joining, shared + joining
    else:
        alone = alone + c.alone_item
    items = _Items(work.count, alone, shared, _resident(work, device), device.multiprocessors, c.sharpness)
    computing = _computing(work, items, c.tail, device) + (c.alone_item if persistent else 0.0)
    us = c.launch + softer_max(computing, c.io * work.sizes.io_bytes * 1e-6, c.sharpness)
    if work.joined:
        us += c.join + c.join_piece * work.joined + c.join_bytes * work.joined_bytes * 1e-6
    if work.counter and work.items > device.multiprocessors:
        us += c.counter
    return float(us)


def softer_max(a: F64 | float, b: F64 | float, sharpness: float) -> F64 | float:
    """A maximum without a corner: the p-norm of (a, b); 2^(1/p) times either where both are equal."""
    return (a**sharpness + b**sharpness) ** (1.0 / sharpness)


@dataclass(frozen=True)
class _Items:
    """Kinds of items on n multiprocessors that hold `resident` at once; arrays over the kinds."""

    count: F64
    alone: F64
    shared: F64
    resident: int
    n: float
    sharpness: float

    def some(self, count: F64) -> _Items:
        """Fewer of each kind; kinds of which none is left are dropped."""
        used = count >= 0.5
        return replace(self, count=count[used], alone=self.alone[used], shared=self.shared[used])

    @cached_property
    def total(self) -> float:
        """How many items there are."""
        return float(self.count.sum())

    def together(self, k: F64 | float) -> F64:
        """µs of an item among k on its multiprocessor."""
        return np.asarray(softer_max(self.alone, k * self.shared, self.sharpness), np.float64)

    def rounds(self, m: F64) -> F64:
        """How long a multiprocessor takes for m items of each kind, in waves of `resident`."""
        waves = np.floor(m / self.resident)
        rest = m - waves * self.resident
        return waves * self.together(self.resident) + np.where(rest > 0, self.together(rest), 0.0)

    @cached_property
    def mean(self) -> float:
        """A multiprocessor's share of all items, `resident` of them at a time."""
        return float(self.count @ self.together(self.resident)) / self.resident / self.n

    @cached_property
    def average(self) -> float:
        """µs of an item that runs by itself."""
        return float(self.count @ self.together(1.0)) / self.total

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """The kinds, longest first."""
        return np.argsort(-self.together(1.0), kind="stable")

    def busiest(self) -> float:
        """How long the busiest multiprocessor takes at least.

        Some one gets m + 1 of the m n + 1 longest items. The first `resident` rounds are dealt out in turn: one
        multiprocessor holds the longest item and those n, 2 n, .. places behind it at once. And the longest item shares
        its multiprocessor until the others are done.
        """
        rank = np.cumsum(self.count[self.order])  # of the last item of each kind
        least = float(self.rounds_in_order(np.floor((rank - 0.5) / self.n) + 1.0).max())
        at = np.searchsorted(rank, np.arange(self.resident) * self.n + 0.5)
        first = self.shared[self.order][at[at < len(rank)]].sum()
        together = float(softer_max(self.alone[self.order[0]], first, self.sharpness))
        return max(least, together, self.longest(self.mean, self.total))

    def rounds_in_order(self, m: F64) -> F64:
        """`rounds`, of the kinds longest first."""
        unordered = np.empty_like(m)
        unordered[self.order] = m
        return self.rounds(unordered)[self.order]

    def longest(self, mean: float, total: float) -> float:
        """When the longest item is done that starts first, among `total` items that take `mean` on a multiprocessor."""
        beside = float(self.together(min(self.resident, max(1.0, total / self.n)))[self.order[0]])
        alone = float(self.alone[self.order[0]])
        return mean * (1.0 - alone / beside) + alone if beside > mean else 0.0


def _computing(work: Work, items: _Items, tail: float, device: Figures) -> float:
    n, chunk = device.multiprocessors, _last_chunk(work, device)
    if _persistent(work) and not (work.counter and work.items > n):
        return _dealt_in_turn(work, items, chunk)
    # The leading rows of all heads come first; the others in chunks of heads, of which the last one ends the launch.
    last = items.some(work.count * np.where(work.early, 0.0 if chunk < 1.0 else 1.0, chunk))
    if not len(last.count):
        return max(items.mean, items.busiest())
    ends = items.mean + max(last.busiest() - last.mean, tail * last.average)
    if work.early.any() and chunk < 1.0:
        early = items.some(work.count * work.early)
        ends = max(ends, early.busiest(), early.longest(items.mean, items.total))
    return ends


def _dealt_in_turn(work: Work, items: _Items, chunk: float) -> float:
    """The busiest block of a persistent kernel when the items are dealt out in turn, in the order in which they lie.

    Split bands of all heads lead; then come the chunks of heads, the smallest first, each longest list first.
    """
    order = np.argsort(-work.entries, kind="stable")
    us, early = items.together(1.0)[order], work.early[order]
    count = work.count[order]
    shares = [chunk] * int(1.0 / chunk + 1e-9)
    shares = [1.0 - sum(shares), *shares]
    runs = [us[early].repeat(np.rint(count[early]).astype(np.int64))]
    runs += [us[~early].repeat(np.rint(count[~early] * share).astype(np.int64)) for share in shares]
    times = np.concatenate(runs)
    blocks = np.arange(times.size) % int(items.n)
    return float(np.bincount(blocks, times).max(initial=0.0))


def _persistent(work: Work) -> bool:
    """Whether a block takes item after item, each one's start beside the end of the one before."""
    return work.instance.family == "block_sm90"


def _last_chunk(work: Work, device: Figures) -> float:
    """Share of the heads that the last chunk holds."""
    room = _CACHED_SHARE[work.instance.family] * device.cache_bytes
    heads = work.sizes.heads
    most = max(1, int(room / max(work.sizes.head_bytes, 1.0)))
    if most >= heads:
        return 1.0
    if work.instance.family == "block_sm90":
        return most / heads  # a smaller chunk leads
    return 1.0 / math.ceil(heads / most)  # of equal size


def _resident(work: Work, device: Figures) -> int:
    """Blocks that a multiprocessor holds at once."""
    room = device.shared_bytes / max(work.instance.shared_bytes, 1.0)
    return max(1, min(work.instance.resident, int(room)))
