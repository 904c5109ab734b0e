"""Stage 1: which operators go into which region.

From the initial scheme on, a region tries to *expand* into free operators beside it, to *seize* operators of a
memory-bound neighbour, and GEMM regions *compete* for operators at their border; it also tries to shrink, to be split,
to be dropped, and to be dropped together with the regions that share a piece of TensorRT's with it. Where a guide
predicts times, the most promising move is tried first, the best choice by prediction is a move as well (*jump*), and
moves that lose by prediction are left out. A trial is timed before and after, each region with its most promising
configuration; it stays when the block gets faster by more than `least_gain` and is rolled back otherwise. Dropping any
region that is kept is always tried; that stays unless the region gains more than `least_gain`. A block that shares
operators with earlier ones starts from the best choice that is known already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.forecast import Forecast
from stof_onnx.fusion.search.initial import initial_choice
from stof_onnx.fusion.search.paths import best_choice
from stof_onnx.fusion.search.timer import Region, Timer

State = dict[Span, Region]

_LEAST_PROMISE = 0.001  # of the model's time: a move other than a drop has to gain that much by prediction


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
        least_gain: microseconds.
        guide: predicts times; without one every move is timed.
        elsewhere: microseconds of the rest of the model for each time that the block occurs, as far as it is known.
        tell: called after each trial with the block's microseconds without regions and as they are now.
        state: the choice so far.
        trials: every move that was timed.
        tried: the regions in them.
    """

    space: BlockSpace
    least_gain: float = 0.0
    guide: Timer | None = None
    elsewhere: float = 0.0
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
        self._ahead([{}, initial_choice(self.space)])
        bare = self.space.total({})
        if bare == float("inf"):  # there is nothing to compare with
            return
        forecast = Forecast(self.space, self.guide) if self.guide else None
        seen, known = {frozenset[Span]()}, self.best
        start = self._timed(known or initial_choice(self.space))
        self._try("known" if known else "initial", start, seen)
        self.state = start
        while any(self._try(move, after, seen) for move, after in self._promising(forecast, seen)):
            pass

    def settle(self) -> None:
        """Makes `state` the best choice of all that has been timed, and tries to drop each of its regions.

        Raises:
            BudgetSpent: out of time.
        """
        if not self.trials:
            return
        seen = {frozenset(self.state)}
        while True:
            self.state = self.best
            self._ahead([self._without(span) for span in self.state])
            if not any(self._try("drop", self._without(span), seen) for span in self.state):
                return

    @property
    def best(self) -> State:
        """The best choice whose parts have all been timed; a region has to gain `least_gain`."""
        known = {span: self.space.ledger.best(region)[0] for span, region in self.space.regions.items()}
        priced = {span: us + self.least_gain for span, us in known.items() if us < float("inf")}
        us, spans = best_choice(priced, self.space.known_piece, 0, len(self.space.block))
        return {span: self.space.regions[span] for span in spans} if us < float("inf") else {}

    def _promising(self, forecast: Forecast | None, seen: set[frozenset[Span]]) -> Iterator[tuple[str, State]]:
        """The moves from `state`: with a forecast, the best first, without those that lose; drops at last.

        Predictions get better with every time that is taken, so they are made anew after each move.
        """
        waiting = [(move, after) for move, after in self._all_moves() if frozenset(after) not in seen]
        if forecast is None:
            yield from waiting
            return
        promise = max(self.least_gain, _LEAST_PROMISE * (self.elsewhere + forecast.total(self.state)))
        while waiting:
            now = forecast.total(self.state)
            waiting = [(move, after) for move, after in waiting if frozenset(after) not in seen]
            losses = [forecast.total(after) - now for _, after in waiting]
            least = min(losses, default=0.0)
            if least >= -promise:
                break
            yield waiting.pop(losses.index(least))
        while frozenset(best := forecast.best(self.least_gain)) not in seen:
            if forecast.total(self.state) - forecast.total(best) < promise:
                break
            yield "jump", dict(best)
            forecast.trust *= 2  # it did not gain
        drops = sorted((after for move, after in waiting if move == "drop"), key=forecast.total)
        self._ahead(drops)
        yield from (("drop", after) for after in drops)  # what may gain first: a drop that stays makes the others anew

    def _all_moves(self) -> Iterator[tuple[str, State]]:
        for span in self.state:
            yield from self._moves(span)
        yield from self._claim()

    def _try(self, move: str, after: State, seen: set[frozenset[Span]]) -> bool:
        """Times a choice; where it gains, it is the new state."""
        key = frozenset(after)
        if key in seen:
            return False
        seen.add(key)
        before = self.space.total(self.state)
        self._ahead([after])
        after = self._timed(after)
        gain = before - self.space.total(after)
        dropped = set(self.state) - set(after) if set(after) < set(self.state) else ()
        kept = gain > (-self.least_gain * len(dropped) if dropped else self.least_gain)
        self.trials.append(Trial(move, tuple(sorted(self.state)), tuple(sorted(after)), gain, kept))
        if kept:
            self.state = after
        self.tell(self.space.known({}), before - max(gain, 0.0))
        return kept

    def _ahead(self, choices: list[State]) -> None:
        """Where there are several devices: what these choices need is measured at once."""
        self.space.ledger.together([request for choice in choices for request in self.space.requests(choice)])

    def _timed(self, state: State) -> State:
        """`state` without the regions that do not run; each is timed with its first configuration that runs."""
        ledger = self.space.ledger
        self.tried.update(state)
        for region in state.values():
            for config in ledger.configs(region):
                if ledger.best(region)[0] < float("inf"):
                    break
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
