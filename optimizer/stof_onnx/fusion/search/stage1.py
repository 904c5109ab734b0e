"""Stage 1: which operators go into which region.

From the initial scheme on, depth first: a region tries to *expand* into free operators beside it, to *seize*
operators of a memory-bound neighbour, and GEMM regions *compete* for operators at their border; it also tries to
shrink, to be split, to be dropped, and to be dropped together with the regions that share a piece of TensorRT's
with it. A trial is timed before and after, on a few sampled configurations; it stays when the block gets faster by
more than `least_gain` and is rolled back otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.initial import initial_choice
from stof_onnx.fusion.search.timer import Region, Timer
from stof_onnx.fusion.segment import Segment

State = dict[Span, Region]
_HOPELESS = 0.02


@dataclass(frozen=True)
class Trial:
    """One move that was timed: its name, the spans before and after, and the microseconds it gains."""

    move: str
    before: tuple[Span, ...]
    after: tuple[Span, ...]
    gain: float
    kept: bool


@dataclass
class Stage1:
    """The search in one block.

    Attributes:
        space: the block.
        rng: of the sampling.
        samples: configurations that a region is judged by.
        least_gain: microseconds.
        state: the choice so far.
        guide: predicts times: moves other than drops are not timed where it sees a loss of more than `_HOPELESS`.
        tell: called after each trial with the block's microseconds without regions and as they are now.
        trials: every move that was timed.
        tried: the regions in them.
    """

    space: BlockSpace
    rng: random.Random
    samples: int = 2
    least_gain: float = 0.0
    guide: Timer | None = None
    tell: Callable[[float, float], None] = lambda bare, now: None
    state: State = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    tried: set[Span] = field(default_factory=set)

    def run(self) -> None:
        """Searches; `best` is the outcome, whatever interrupts it.

        Raises:
            BudgetSpent: out of time.
        """
        if not self.space.regions:
            return
        bare = self.space.total({})
        if bare == float("inf"):  # there is nothing to compare with
            return
        start = self._sampled(initial_choice(self.space))
        total = self.space.total(start)
        self.trials.append(Trial("initial", (), tuple(sorted(start)), bare - total, total < bare - self.least_gain))
        self.state = start
        queue, seen = list(start), {frozenset(start)}
        while True:
            moves = self._moves(queue.pop()) if queue else self._claim()
            kept = self._first_gain(moves, seen)
            if kept is None and not queue:
                break
            if kept is not None:
                near = [s for s in self.state if any(s[0] <= t[1] and s[1] >= t[0] for t in kept)]
                queue = [s for s in queue if s in self.state and s not in near] + near

    @property
    def best(self) -> State:
        """The best choice so far: `state`, or no region where that is not known to gain."""
        bare, total = self.space.known({}), self.space.known(self.state)
        return dict(self.state) if total < bare - self.least_gain and bare < float("inf") else {}

    def _first_gain(self, moves: Iterator[tuple[str, State]], seen: set[frozenset[Span]]) -> list[Span] | None:
        """Makes the first move that gains; the spans that it changed, None when none gains."""
        before = self.space.total(self.state)
        for move, after in moves:
            key = frozenset(after)
            if key in seen:
                continue
            seen.add(key)
            if "drop" not in move and self._hopeless(after):
                continue
            after = self._sampled(after)
            gain = before - self.space.total(after)
            kept = gain > self.least_gain
            self.trials.append(Trial(move, tuple(sorted(self.state)), tuple(sorted(after)), gain, kept))
            self.tell(self.space.known({}), before - max(gain, 0.0))
            if kept:
                changed = [*(s for s in self.state if s not in after), *(s for s in after if s not in self.state)]
                self.state = after
                return changed
        return None

    def _hopeless(self, after: State) -> bool:
        if self.guide is None:
            return False
        now = self._predicted(self.guide, self.state)
        return self._predicted(self.guide, after) > now * (1.0 + _HOPELESS)

    def _predicted(self, guide: Timer, state: State) -> float:
        """Microseconds of the block by the guide, each region with the configuration that it would try first."""
        total = 0.0
        for region in state.values():
            names = guide.configs(region)
            total += guide.fused(region, names[0]).us if names else 0.0
        for piece in self.space.pieces(state):
            if self.space.fusible.intersection(range(*piece)):
                total += guide.left(Segment(self.space.block, *piece)).us
        return total

    def _sampled(self, state: State) -> State:
        """`state` without the regions that do not run; each is timed, with the most promising configuration first."""
        ledger = self.space.ledger
        self.tried.update(state)
        for region in state.values():
            names = list(ledger.configs(region))
            if ledger.best(region)[1] == "":
                picked = names[:1] + self.rng.sample(names[1:], min(len(names) - 1, self.samples - 1))
                for config in picked:
                    ledger.fused(region, config)
        return {span: region for span, region in state.items() if ledger.best(region)[0] < float("inf")}

    def _moves(self, span: Span) -> Iterator[tuple[str, State]]:
        if span in self.state:
            yield from self._expand(span)
            yield from self._take(span)
            yield from self._shrink(span)
            yield from self._split(span)
            yield "drop", self._without(span)
            yield "drop group", self._without(*self._group(span))

    def _expand(self, span: Span) -> Iterator[tuple[str, State]]:
        """Into free operators on one side or both."""
        left = max((s[1] for s in self.state if s[1] <= span[0]), default=0)
        right = min((s[0] for s in self.state if s[0] >= span[1]), default=len(self.space.block))
        for start, stop in self._between(left, right):
            if start <= span[0] and stop >= span[1] and (start, stop) != span:
                yield "expand", self._with((start, stop), span)

    def _take(self, span: Span) -> Iterator[tuple[str, State]]:
        """Operators of a neighbour, which keeps the rest where a template computes it, and is dropped otherwise."""
        for other in self.state:
            if other[0] != span[1] and other[1] != span[0]:
                continue
            move = "compete" if self.state[other].instance.gemms and self.state[span].instance.gemms else "seize"
            for start, stop in self._between(min(span[0], other[0]), max(span[1], other[1])):
                if start > span[0] or stop < span[1] or (start, stop) == span:
                    continue
                rest = (stop, other[1]) if other[0] == span[1] else (other[0], start)
                state = self._with((start, stop), span, other)
                if rest in self.space.regions:
                    yield move, {**state, rest: self.space.regions[rest]}
                yield move, state

    def _shrink(self, span: Span) -> Iterator[tuple[str, State]]:
        """By as little as possible, at either end."""
        inner = [s for s in self._between(*span) if s != span]
        for end in (0, 1):
            shorter = next((s for s in inner if s[end] == span[end]), None)
            if shorter is not None:
                yield "shrink", self._with(shorter, span)

    def _claim(self) -> Iterator[tuple[str, State]]:
        """A new region in free operators: of those that no other of its kind contains, the longest first."""
        taken = {i for start, stop in self.state for i in range(start, stop)}
        free = [s for s in self.space.regions if not taken.intersection(range(*s))]
        for span in sorted(free, key=lambda s: (s[0] - s[1], s)):
            kind = self.space.regions[span].instance.gemms > 0
            alike = [s for s in free if s != span and (self.space.regions[s].instance.gemms > 0) == kind]
            if not any(s[0] <= span[0] and s[1] >= span[1] for s in alike):
                yield "claim", self._with(span)

    def _split(self, span: Span) -> Iterator[tuple[str, State]]:
        """Into two regions, the first as long as it can be."""
        for middle in range(span[1] - 1, span[0], -1):
            first, second = (span[0], middle), (middle, span[1])
            if first in self.space.regions and second in self.space.regions:
                yield "split", {**self._with(first, span), second: self.space.regions[second]}
                return

    def _group(self, span: Span) -> list[Span]:
        """The regions that would share a piece with `span`, were they dropped."""
        cuts = self.space.cuts
        low = max((c for c in cuts if c <= span[0]), default=0)
        high = min((c for c in cuts if c >= span[1]), default=len(self.space.block))
        return [s for s in self.state if s[0] < high and s[1] > low]

    def _between(self, low: int, high: int) -> Iterator[Span]:
        """Possible regions within low..high, the longest first."""
        inside = [s for s in self.space.regions if s[0] >= low and s[1] <= high]
        yield from sorted(inside, key=lambda s: (s[0] - s[1], s))

    def _with(self, new: Span, *gone: Span) -> State:
        return {**self._without(*gone), new: self.space.regions[new]}

    def _without(self, *gone: Span) -> State:
        return {s: r for s, r in self.state.items() if s not in gone}
