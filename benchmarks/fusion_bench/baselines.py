"""What the two-stage search is compared with: every measurement there is, and random choices with the same number."""

from __future__ import annotations

import random
from functools import cache

from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.timer import Region

Choice = dict[Span, Region]


def exhaustive(space: BlockSpace) -> tuple[float, Choice]:
    """The best choice there is: every region in every configuration and every piece is timed."""
    total, spans = _best(space, 0, len(space.block))
    return total, {span: space.regions[span] for span in spans}


def possible_pieces(space: BlockSpace) -> list[Span]:
    """What some choice of regions leaves to TensorRT in one piece and could have fused."""
    starts = {start for start, _ in space.regions} | {len(space.block)}
    stops = {stop for _, stop in space.regions} | {0}
    spans = [(stop, start) for stop in sorted(stops) for start in sorted(starts) if stop < start]
    return [span for span in spans if space.fusible.intersection(range(*span))]


def price_of_pieces(space: BlockSpace) -> dict[Span, float]:
    """The least time of a block that leaves a piece to TensorRT, by piece."""
    length = len(space.block)
    found: dict[Span, float] = {}
    for start, stop in possible_pieces(space):
        ahead, _ = _best(space, 0, start, region_last=True)
        behind, _ = _best(space, stop, length, region_first=True)
        found[start, stop] = ahead + space.piece_us((start, stop)) + behind
    return found


def _best(
    space: BlockSpace, low: int, high: int, region_first: bool = False, region_last: bool = False
) -> tuple[float, tuple[Span, ...]]:
    """The best choice for the operators low to high - 1, which begins or ends with a region where that is asked for."""
    starts = sorted({start for start, _ in space.regions})

    @cache
    def best(at: int, region_next: bool) -> tuple[float, tuple[Span, ...]]:
        """From operator `at` on; a piece that TensorRT keeps is followed by a region, or by nothing."""
        if at == high:
            return 0.0, ()
        found = []
        for (start, stop), region in space.regions.items():
            if start == at and stop <= high:
                rest, spans = best(stop, False)
                found.append((_fused(space.ledger, region) + rest, ((start, stop), *spans)))
        ends = [s for s in starts if at < s < high] + ([] if region_last else [high])
        for stop in () if region_next else ends:
            rest, spans = best(stop, stop != high)
            found.append((space.piece_us((at, stop)) + rest, spans))
        return min(found, default=(float("inf"), ()))

    return best(low, region_first)


def _fused(ledger: Ledger, region: Region) -> float:
    for config in ledger.configs(region):
        ledger.fused(region, config)
    return ledger.best(region)[0]


def random_search(space: BlockSpace, measurements: int, rng: random.Random) -> tuple[float, Choice]:
    """The best of random choices with random configurations, until so many measurements are made."""
    best: tuple[float, Choice] = (space.total({}), {})
    tries = 0
    while space.ledger.samples < measurements and tries < 100 * measurements:
        tries += 1
        choice: Choice = {}
        for span in rng.sample(list(space.regions), len(space.regions)):
            if rng.random() < 0.5 and not any(s[0] < span[1] and s[1] > span[0] for s in choice):
                choice[span] = space.regions[span]
        for region in choice.values():
            space.ledger.fused(region, rng.choice(list(space.ledger.configs(region))))
        total = space.total(choice)
        if total < best[0]:
            best = total, choice
    return best
