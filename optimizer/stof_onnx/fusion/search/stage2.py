"""Stage 2: boundaries are fixed, a fixed number of samples goes into configurations.

The first round gives every region the same number of samples. Each later one gives more to the regions that gained
most in the round before, in proportion, and one to each that still has untried configurations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.timer import Region


def sample_configs(
    regions: Sequence[tuple[Region, int]], ledger: Ledger, samples: int, rng: random.Random, per_round: int = 2
) -> int:
    """Times configurations that have no time yet; returns how many.

    Args:
        regions: distinct regions, and how often each occurs: gains count that often.
        samples: the budget; all of it is spent unless every configuration has been tried.
        per_round: samples a region in the first round.

    Raises:
        BudgetSpent: out of time; the ledger keeps what was timed.
    """
    spent = 0
    shares = {region.key: per_round for region, _ in regions}
    while spent < samples:
        gains: dict[str, float] = {}
        for region, count in regions:
            key, untried = region.key, ledger.untried(region)
            number = min(len(untried), shares[key], samples - spent)
            before = ledger.best(region)[0]
            for config in rng.sample(untried, number):
                ledger.fused(region, config)
            spent += number
            gains[key] = count * max(0.0, before - ledger.best(region)[0]) if before < float("inf") else 0.0
        if not any(ledger.untried(region) for region, _ in regions):
            break
        total = sum(gains.values())
        pool = per_round * len(regions)
        shares = {key: 1 + (round(pool * gain / total) if total else 0) for key, gain in gains.items()}
    return spent
