"""Stage 2: boundaries are fixed, a fixed number of samples goes into configurations.

One sample after the other, or one on each device, goes to the region that promises most: the microseconds that it
takes, as often as it occurs, times what its samples have gained of late. Every region starts with the same hope; a
sample that gains nothing halves it, one that gains much restores it. Samples are the most promising configuration that
is untried and a random one, in turn, since rankings can be wrong. A configuration that would lose even if the guide
predicted too much is no sample.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.timer import Region, Timer

_GOOD = 0.05  # a gain after which hope is as at first
_AS_PREDICTED = 1.02  # of what a guide predicts: there is little left to gain
_DOUBT = 0.25  # share of a prediction that it may be too high
_MOST = 1e9  # microseconds, in place of an infinite time


def sample_configs(
    regions: Sequence[tuple[Region, int]], ledger: Ledger, samples: int, rng: random.Random, guide: Timer | None = None
) -> int:
    """Times configurations that have no time yet; returns how many.

    Args:
        regions: distinct regions, and how often each occurs: gains count that often.
        samples: the budget; all of it is spent unless nothing is left to try.
        guide: predicts times; a region that is as fast as predicted is not sampled, and of the others only what may
            be faster than the best so far.

    Raises:
        BudgetSpent: out of time; the ledger keeps what was timed.
    """
    hopes = {region.key: 1.0 for region, _ in regions}
    arms = {region.key: (region, count) for region, count in regions}
    guesses = {key: _predictions(region, guide) for key, (region, _) in arms.items()}
    arms = {key: arm for key, arm in arms.items() if ledger.best(arm[0])[0] > _enough(guesses[key])}
    spent = 0
    while spent < samples:
        hopeful = {key: _hopeful(region, ledger, guesses[key]) for key, (region, _) in arms.items()}
        arms = {key: arm for key, arm in arms.items() if hopeful[key]}
        if not arms:
            break
        promise = {k: hopes[k] * count * min(ledger.best(region)[0], _MOST) for k, (region, count) in arms.items()}
        picked = sorted(arms, key=lambda k: -promise[k])[: min(ledger.devices, samples - spent)]
        requests: list[tuple[Region, str]] = []
        for number, key in enumerate(picked, spent):
            untried = hopeful[key]
            requests.append((arms[key][0], untried[0] if number % 2 == 0 else rng.choice(untried)))
        befores = [ledger.best(region)[0] for region, _ in requests]
        ledger.together(requests)
        for key, before, request in zip(picked, befores, requests, strict=True):
            us = ledger.fused(*request)
            gained = max(0.0, 1.0 - us / before) if before < float("inf") else 1.0
            hopes[key] = max(hopes[key] / 2, min(1.0, gained / _GOOD))
        spent += len(picked)
    return spent


def _predictions(region: Region, guide: Timer | None) -> dict[str, float]:
    """Microseconds by configuration, of those that the guide knows."""
    return {name: guide.fused(region, name).us for name in guide.configs(region)} if guide else {}


def _enough(guesses: dict[str, float]) -> float:
    """A time that leaves little to gain."""
    return _AS_PREDICTED * min(guesses.values(), default=0.0)


def _hopeful(region: Region, ledger: Ledger, guesses: dict[str, float]) -> list[str]:
    """Untried configurations that may be faster than the best so far."""
    best = ledger.best(region)[0]
    return [name for name in ledger.untried(region) if (1.0 - _DOUBT) * guesses.get(name, 0.0) < best]
