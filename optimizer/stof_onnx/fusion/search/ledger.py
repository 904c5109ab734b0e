"""Every time that a search has: nothing is timed twice, budgets are kept, and a cache may serve what others timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stof_onnx.errors import StofError
from stof_onnx.fusion.piece_model import piece_key
from stof_onnx.fusion.search.timer import Measurement, ParallelTimer, Region, Request, Timer
from stof_onnx.fusion.segment import Segment


class BudgetSpent(Exception):
    """The time for measuring is used up."""


class TimeStore(Protocol):
    """Times that outlive a process; see plan_cache.py."""

    def get(self, timer: str, segment: str, what: str) -> float | None:
        """Microseconds, or None."""

    def put(self, timer: str, segment: str, what: str, us: float) -> None:
        """Keeps a time."""


class Ledger:
    """Times by what they depend on: the key of a region (and a configuration) or of a piece.

    Args:
        timer: measures what is not known.
        budget: seconds of measuring (builds not counted); `BudgetSpent` is raised in place of a measurement beyond it.
        store: times of earlier runs.

    Attributes:
        samples: measurements made; `cached`: times that the store had; `builds`: of engines.
        seconds, build_seconds: spent on them.
        problems: why something does not run, by key.
    """

    def __init__(self, timer: Timer, budget: float = float("inf"), store: TimeStore | None = None) -> None:
        self.timer, self.budget, self.store = timer, budget, store
        self.times: dict[tuple[str, str], float] = {}
        self.samples = self.cached = self.builds = 0
        self.seconds = self.build_seconds = 0.0
        self.problems: dict[str, str] = {}  # by key
        self._configs: dict[str, tuple[str, ...]] = {}
        self._keys: dict[Segment, str] = {}  # of pieces; empty where a size is not known

    def configs(self, region: Region) -> Sequence[str]:
        """As the timer's, asked once."""
        key = region.key
        if key not in self._configs:
            self._configs[key] = tuple(self.timer.configs(region))
        return self._configs[key]

    def fused(self, region: Region, config: str) -> float:
        """Microseconds of the region with this configuration.

        Raises:
            BudgetSpent: it is not known, and there is no time to measure it.
        """
        return self._time(region.key, config, lambda: self.timer.fused(region, config))

    def left(self, piece: Segment) -> float:
        """Microseconds of a piece that is left to TensorRT.

        Raises:
            BudgetSpent: as `fused`.
        """
        key = self._key(piece)
        return self._time(key, "", lambda: self.timer.left(piece)) if key else float("inf")

    def known_left(self, piece: Segment) -> float | None:
        """`left` where this search has timed it or can not, else None."""
        key = self._key(piece)
        return self.times.get((key, "")) if key else float("inf")

    @property
    def devices(self) -> int:
        """How many measurements are made at once."""
        return self.timer.devices if isinstance(self.timer, ParallelTimer) else 1

    def together(self, requests: Sequence[Request]) -> None:
        """Times what is not known of these at once, where there are several devices; nothing otherwise.

        Raises:
            BudgetSpent: as `fused`.
        """
        if not isinstance(self.timer, ParallelTimer):
            return
        keys = ((self._key(r), "") if isinstance(r, Segment) else (r[0].key, r[1]) for r in requests)
        wanted = {key: request for key, request in zip(keys, requests, strict=True) if key[0] and not self._recall(key)}
        if wanted and self.seconds >= self.budget:
            raise BudgetSpent
        for key, found in zip(wanted, self.timer.many(list(wanted.values())), strict=True):
            self._note(key, found)

    def best(self, region: Region) -> tuple[float, str]:
        """The best time so far and its configuration, of equals the more promising; infinite where none was taken."""
        key, names = region.key, self.configs(region)
        known = [(self.times[key, name], place) for place, name in enumerate(names) if (key, name) in self.times]
        us, place = min(known, default=(float("inf"), -1))
        return us, names[place] if place >= 0 else ""

    def untried(self, region: Region) -> list[str]:
        """Configurations without a time."""
        return [config for config in self.configs(region) if (region.key, config) not in self.times]

    def _key(self, piece: Segment) -> str:
        if piece not in self._keys:
            try:
                self._keys[piece] = piece_key(piece)
            except StofError as error:
                self._keys[piece], self.problems[piece.hash] = "", str(error)
        return self._keys[piece]

    def _time(self, about: str, what: str, measure: Callable[[], Measurement]) -> float:
        key = (about, what)
        if not self._recall(key):
            if self.seconds >= self.budget:
                raise BudgetSpent
            self._note(key, measure())
        return self.times[key]

    def _recall(self, key: tuple[str, str]) -> bool:
        """Whether a time is known, here or in the store."""
        if key not in self.times:
            us = self.store.get(self.timer.name, *key) if self.store else None
            if us is None:
                return False
            self.times[key] = us
            self.cached += 1
        return True

    def _note(self, key: tuple[str, str], found: Measurement) -> None:
        self.times[key] = found.us
        self.samples += 1
        self.builds += found.build_seconds > 0
        self.seconds += found.seconds - found.build_seconds
        self.build_seconds += found.build_seconds
        if found.problem:
            self.problems[key[0]] = found.problem
        elif self.store:
            self.store.put(self.timer.name, *key, found.us)
