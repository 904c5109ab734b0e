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
    starts = sorted({start for start, _ in space.regions})
    length = len(space.block)

    @cache
    def best(at: int, region_next: bool) -> tuple[float, tuple[Span, ...]]:
        """From operator `at` on; a piece that TensorRT keeps is followed by a region, or by nothing."""
        if at == length:
            return 0.0, ()
        found = []
        for (start, stop), region in space.regions.items():
            if start == at:
                rest, spans = best(stop, False)
                found.append((_fused(space.ledger, region) + rest, ((start, stop), *spans)))
        for stop in () if region_next else [s for s in starts if s > at] + [length]:
            rest, spans = best(stop, stop != length)
            found.append((space.piece_us((at, stop)) + rest, spans))
        return min(found, default=(float("inf"), ()))

    total, spans = best(0, False)
    return total, {span: space.regions[span] for span in spans}


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
