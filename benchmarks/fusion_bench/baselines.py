"""What the two-stage search is compared with: every measurement there is, and random choices with the same number."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle

from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.paths import best_choice
from stof_onnx.fusion.search.timer import Region
from stof_onnx.fusion.segment import block_hash
from stof_onnx.fusion.sequence import Block

Choice = dict[Span, Region]
Best = tuple[float, tuple[Span, ...]]


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


def _best(space: BlockSpace, low: int, high: int, region_first: bool = False, region_last: bool = False) -> Best:
    regions = {span: _fused(space.ledger, region) for span, region in space.regions.items()}
    return best_choice(regions, space.piece_us, low, high, region_first, region_last)


def _fused(ledger: Ledger, region: Region) -> float:
    for config in ledger.configs(region):
        ledger.fused(region, config)
    return ledger.best(region)[0]


def spaces_of(blocks: Sequence[Block], ledger: Ledger) -> dict[str, BlockSpace]:
    """The distinct blocks of a model that have regions, by hash."""
    counts = Counter(block_hash(block) for block in blocks)
    kinds = {block_hash(block): block for block in blocks}
    spaces = {key: BlockSpace(block, ledger, counts[key]) for key, block in kinds.items()}
    return {key: space for key, space in spaces.items() if space.regions}


def total_of(spaces: Mapping[str, BlockSpace], choices: Mapping[str, Choice]) -> float:
    """Microseconds of all blocks of a model."""
    return sum(space.count * space.total(choices.get(key, {})) for key, space in spaces.items())


class RandomSearch:
    """The best of random choices with random configurations, for one kind of block after the other.

    Attributes:
        ledger: with the times so far.
        choices: the best so far.
    """

    def __init__(self, spaces: Mapping[str, BlockSpace], rng: random.Random) -> None:
        self.spaces, self.rng = spaces, rng
        self.ledger = next(iter(spaces.values())).ledger
        self.choices: dict[str, Choice] = {key: {} for key in spaces}
        self._turn = cycle(spaces)

    @property
    def total(self) -> float:
        """Microseconds of the best so far."""
        return total_of(self.spaces, self.choices)

    def run(self, measurements: int, enough: float = 0.0) -> None:
        """Goes on until so many measurements are made, or until `total` is `enough`."""
        for _ in range(100 * measurements):
            if self.ledger.samples >= measurements or self.total <= enough:
                return
            self._draw(next(self._turn))

    def _draw(self, key: str) -> None:
        space, choice = self.spaces[key], Choice()
        for span in self.rng.sample(list(space.regions), len(space.regions)):
            if self.rng.random() < 0.5 and not any(s[0] < span[1] and s[1] > span[0] for s in choice):
                choice[span] = space.regions[span]
        for region in choice.values():
            self.ledger.fused(region, self.rng.choice(list(self.ledger.configs(region))))
        if space.total(choice) < space.total(self.choices[key]):
            self.choices[key] = choice
