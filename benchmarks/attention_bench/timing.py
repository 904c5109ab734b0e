"""CUDA-graph timing: launch gaps stay out; warm L2 repeats one input set, cold L2 rotates among sets larger than it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

CALLS = 10
L2_BYTES = 60 << 20


def repeated(call: Callable[[], object], budget_ms: float) -> list[Callable[[], object]]:
    """`call` as often as a graph should hold it: CALLS times, fewer where that takes a quarter of the budget."""
    start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
    call()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return [call] * max(1, min(CALLS, int(budget_ms / 4 / max(start.elapsed_time(stop), 1e-3))))


def graph_us(calls: Sequence[Callable[[], object]], reps: int = 15, budget_ms: float = 150.0) -> float:
    """Median microseconds of one call when `calls` are replayed one after the other as one CUDA graph.

    Every call runs once before the capture (lazy initialisation). Stops early once `budget_ms` of device time went into
    replays, but not before three of them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in dict.fromkeys(calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(2 + reps):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
        if len(times) >= 4 and sum(times) > budget_ms:
            break
    kept = sorted(times[1:])
    return kept[len(kept) // 2] * 1e3 / len(calls)


def cold_sets(io_bytes: int) -> int:
    """How many input sets make one round trip larger than three L2s (at most 64, at least 1)."""
    return max(1, min(64, -(-3 * L2_BYTES // io_bytes)))
