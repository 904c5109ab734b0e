"""The best choice of regions in a block, where every region and every piece has a time: a shortest path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from stof_onnx.fusion.scheme import Span


def best_choice(
    regions: Mapping[Span, float],
    piece_us: Callable[[Span], float],
    low: int,
    high: int,
    region_first: bool = False,
    region_last: bool = False,
) -> tuple[float, tuple[Span, ...]]:
    """The least time of the operators low to high - 1, and the regions of that choice; infinite where there is none.

    Args:
        regions: times of the possible regions.
        piece_us: time of operators that TensorRT keeps in one piece. Two pieces never follow each other.
        region_first, region_last: the choice has to begin or end with a region, if it has operators.
    """
    starts = sorted({start for start, _ in regions})

    @cache
    def best(at: int, region_next: bool) -> tuple[float, tuple[Span, ...]]:
        if at == high:
            return 0.0, ()
        found = []
        for (start, stop), us in regions.items():
            if start == at and stop <= high:
                rest, spans = best(stop, False)
                found.append((us + rest, ((start, stop), *spans)))
        ends = [start for start in starts if at < start < high] + ([] if region_last else [high])
        for stop in () if region_next else ends:
            rest, spans = best(stop, stop != high)
            if rest < float("inf"):
                found.append((piece_us((at, stop)) + rest, spans))
        return min(found, default=(float("inf"), ()))

    return best(low, region_first)
