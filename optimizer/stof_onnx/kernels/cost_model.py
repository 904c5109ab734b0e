"""How long a launch takes: work items, steps and bytes times a device's coefficients. Arithmetic only, nothing is run.

An item of a kernel has two lengths: `alone`, what it takes on an idle multiprocessor (steps follow one another), and
`shared`, what it takes from a busy one's throughput. k items at once need softer_max(alone, k * shared); a
multiprocessor that holds r at once takes more than r in waves.

A launch lasts as long as its busiest multiprocessor. Items start longest first, so of n multiprocessors some one gets
m + 1 items that are at least as long as the (m n + 1)-th longest (`_busiest`); with much to do it works the mean
(`_mean`) and part of a last item. Heads are taken in chunks whose K and V stay in the cache, so the end of a launch is
that of its last chunk. Tensors read and written once set a floor, `io`; split rows cost a second launch to join them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from stof_onnx.kernels.work import F64, Work

_SHARPNESS = 2.0  # of the softer maxima: 2^(1/2) = 1.41 times either where both are equal
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
    computing = _computing(work, alone, shared, c.tail, device) + (c.alone_item if persistent else 0.0)
    us = c.launch + softer_max(computing, c.io * work.sizes.io_bytes * 1e-6)
    if work.joined:
        us += c.join + c.join_piece * work.joined + c.join_bytes * work.joined_bytes * 1e-6
    if work.counter and work.items > device.multiprocessors:
        us += c.counter
    return float(us)


def softer_max(a: F64 | float, b: F64 | float) -> F64 | float:
    """A maximum without a corner: the p-norm of (a, b)."""
    p = _SHARPNESS
    return (a**p + b**p) ** (1.0 / p)


def _computing(work: Work, alone: F64, shared: F64, tail: float, device: Figures) -> float:
    n, resident = device.multiprocessors, _resident(work, device)
    mean = _mean(work.count, alone, shared, resident, n)
    chunk = _last_chunk(work, device)
    if _persistent(work) and not (work.counter and work.items > n):  # items are dealt out in turn
        if chunk == 1.0:
            return _in_turn(work.count, alone, shared, n)
        return mean * math.ceil(work.items / n) / (work.items / n)
    # The leading rows of all heads come first; the others in chunks of heads, of which the last one ends the launch.
    last = work.count * np.where(work.early, 0.0 if chunk < 1.0 else 1.0, chunk)
    used = last >= 0.5
    if not used.any():
        return max(mean, _busiest(work.count, alone, shared, resident, n))
    count, alone_, shared_ = last[used], alone[used], shared[used]
    over = _busiest(count, alone_, shared_, resident, n) - _mean(count, alone_, shared_, resident, n)
    remainder = tail * float(np.average(_rounds(np.ones(1), alone_, shared_, resident), weights=count))
    ends = mean + max(over, remainder)
    if work.early.any() and chunk < 1.0:
        early = work.early
        ends = max(ends, _busiest(work.count[early], alone[early], shared[early], resident, n))
    return ends


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


def _rounds(m: F64, alone: F64, shared: F64, resident: int) -> F64:
    """How long a multiprocessor takes for m items of a kind, in waves of `resident`."""
    waves = np.floor(m / resident)
    rest = m - waves * resident
    last = np.where(rest > 0, softer_max(alone, rest * shared), 0.0)
    return np.asarray(waves * softer_max(alone, resident * shared) + last, np.float64)


def _mean(count: F64, alone: F64, shared: F64, resident: int, n: float) -> float:
    """A multiprocessor's share of all items, `resident` of them at a time."""
    full = np.full(1, float(resident))
    return float((count * _rounds(full, alone, shared, resident)).sum()) / resident / n


def _busiest(count: F64, alone: F64, shared: F64, resident: int, n: float) -> float:
    """How long the busiest multiprocessor takes at least.

    Some one gets m + 1 of the m n + 1 longest items. The first `resident` rounds are dealt out in turn: one
    multiprocessor holds the longest item and those n, 2 n, .. places behind it at once.
    """
    order = np.argsort(-_rounds(np.ones(1), alone, shared, resident), kind="stable")
    alone, shared, rank = alone[order], shared[order], np.cumsum(count[order])  # rank of the last item of each kind
    m = np.floor((rank - 0.5) / n) + 1.0
    least = float(_rounds(m, alone, shared, resident).max())
    at = np.searchsorted(rank, np.arange(resident) * n + 0.5)
    first = shared[at[at < len(rank)]].sum()
    return max(least, float(softer_max(alone[0], first)))


def _in_turn(count: F64, alone: F64, shared: F64, n: float) -> float:
    """The first multiprocessor's items where it gets the longest one and every n-th after it."""
    one = _rounds(np.ones(1), alone, shared, 1)
    order = np.argsort(-one, kind="stable")
    last = np.floor((np.cumsum(count[order]) - 0.5) / n)
    return float((np.diff(last, prepend=-1.0) * one[order]).sum())
