"""Stage 2: boundaries are fixed, a fixed number of samples goes into configurations.

One sample after the other, or one on each device, goes to the region that promises most: the microseconds that it
takes, as often as it occurs, times what its samples have gained of late. Every region starts with the same hope; a
sample that gains nothing halves it, one that gains much restores it. Samples are the most promising configuration that
is untried and a random one, in turn, since rankings can be wrong.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.timer import Region, Timer

_GOOD = 0.05  # a gain after which hope is as at first
_AS_PREDICTED = 1.02  # of what a guide predicts: there is little left to gain
_MOST = 1e9  # microseconds, in place of an infinite time


def sample_configs(
    regions: Sequence[tuple[Region, int]], ledger: Ledger, samples: int, rng: random.Random, guide: Timer | None = None
) -> int:
    """Times configurations that have no time yet; returns how many.

    Args:
        regions: distinct regions, and how often each occurs: gains count that often.
        samples: the budget; all of it is spent unless nothing is left to try.
        guide: predicts times; a region that is as fast as predicted is not sampled.

    Raises:
        BudgetSpent: out of time; the ledger keeps what was timed.
    """
    hopes = {region.key: 1.0 for region, _ in regions}
    arms = {region.key: (region, count) for region, count in regions if not _as_predicted(region, ledger, guide)}
    spent = 0
    while spent < samples:
        arms = {key: (region, count) for key, (region, count) in arms.items() if ledger.untried(region)}
        if not arms:
            break
        promise = {k: hopes[k] * count * min(ledger.best(region)[0], _MOST) for k, (region, count) in arms.items()}
        picked = sorted(arms, key=lambda k: -promise[k])[: min(ledger.devices, samples - spent)]
        requests: list[tuple[Region, str]] = []
        for number, key in enumerate(picked, spent):
            untried = ledger.untried(arms[key][0])
            requests.append((arms[key][0], untried[0] if number % 2 == 0 else rng.choice(untried)))
        befores = [ledger.best(region)[0] for region, _ in requests]
        ledger.together(requests)
        for key, before, request in zip(picked, befores, requests, strict=True):
            us = ledger.fused(*request)
            gained = max(0.0, 1.0 - us / before) if before < float("inf") else 1.0
            hopes[key] = max(hopes[key] / 2, min(1.0, gained / _GOOD))
        spent += len(picked)
    return spent


def _as_predicted(region: Region, ledger: Ledger, guide: Timer | None) -> bool:
    names = guide.configs(region) if guide else ()
    if guide is None or not names:
        return False
    return ledger.best(region)[0] <= _AS_PREDICTED * min(guide.fused(region, name).us for name in names)
