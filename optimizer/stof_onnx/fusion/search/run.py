"""The two-stage search over all blocks of a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stof_onnx.fusion.plan import BlockPlan, FusionPlan, PlannedRegion
from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import BudgetSpent, Ledger, TimeStore
from stof_onnx.fusion.search.stage1 import Stage1, Trial
from stof_onnx.fusion.search.stage2 import sample_configs
from stof_onnx.fusion.search.timer import Region, Timer
from stof_onnx.fusion.segment import block_hash
from stof_onnx.fusion.sequence import Block


@dataclass(frozen=True)
class SearchOptions:
    """How to search.

    Attributes:
        budget: seconds of measuring.
        samples: configurations that stage 2 may time; None for `samples_each` a kept region.
        least_gain: microseconds that a change must gain, to be more than noise.
        seed: of the sampling.
    """

    budget: float = 60.0
    samples: int | None = None
    samples_each: int = 1
    least_gain: float = 0.3
    seed: int = 0


Watch = Callable[[str, float], None]  # what is being done, and the share of the budget that is spent


def search(
    blocks: Sequence[Block],
    timer: Timer,
    precision: str,
    options: SearchOptions,
    store: TimeStore | None = None,
    watch: Watch | None = None,
    guide: Timer | None = None,
) -> FusionPlan:
    """The plan for these blocks, those that hold most of the model first.

    Ctrl-C and the end of the budget keep the best found so far (`complete` is False).

    Args:
        blocks: of one model; equal ones are searched once.
        precision: of the engine, noted in the plan.
        store: times of earlier runs.
        watch: told what is being done.
        guide: a timer that predicts, for leaving out what has no chance; None times every move.
    """
    ledger, rng = Ledger(timer, options.budget, store), random.Random(options.seed)
    counts = Counter(block_hash(block) for block in blocks)
    kinds = {block_hash(block): block for block in blocks}
    stages: dict[str, Stage1] = {}
    complete = True
    try:
        weighty = sorted(kinds.items(), key=lambda kind: -counts[kind[0]] * len(kind[1]))
        for number, (key, block) in enumerate(weighty):
            space = BlockSpace(block, ledger, counts[key])
            stages[key] = Stage1(space, options.least_gain, guide, _known_us(stages) / counts[key])
            if watch:
                stages[key].tell = _teller(watch, ledger, f"block {number + 1} of {len(kinds)}")
                watch(f"block {number + 1} of {len(kinds)}", ledger.seconds / ledger.budget)
            stages[key].run()
        if watch:
            watch("configurations", ledger.seconds / ledger.budget)
        _stage2(stages, ledger, options, rng, guide)
        for stage in stages.values():
            stage.settle()
    except (BudgetSpent, KeyboardInterrupt):
        complete = False
    plans = {key: _block_plan(key, stages[key]) for key in kinds if key in stages}
    return FusionPlan(
        timer=timer.name,
        precision=precision,
        blocks={key: plan for key, plan in plans.items() if plan.regions},
        samples=ledger.samples,
        builds=ledger.builds,
        seconds=round(ledger.seconds, 3),
        build_seconds=round(ledger.build_seconds, 3),
        cached=ledger.cached,
        complete=complete,
        notes=tuple(sorted(set(ledger.problems.values()))),
    )


def _known_us(stages: dict[str, Stage1]) -> float:
    """Microseconds of the model in the blocks that have been searched."""
    known = (stage.space.count * stage.space.known(stage.best) for stage in stages.values())
    return sum(us for us in known if us < float("inf"))


def _teller(watch: Watch, ledger: Ledger, block: str) -> Callable[[float, float], None]:
    def tell(bare: float, now: float) -> None:
        left = max(0.0, ledger.budget - ledger.seconds)
        watch(f"{block}: {now:.0f} µs of {bare:.0f}, {left:.0f} s left", ledger.seconds / ledger.budget)

    return tell


def _stage2(
    stages: dict[str, Stage1], ledger: Ledger, options: SearchOptions, rng: random.Random, guide: Timer | None
) -> None:
    regions: dict[str, tuple[Region, int]] = {}
    for stage in stages.values():
        for region in stage.best.values():
            known = regions.get(region.key, (region, 0))
            regions[region.key] = known[0], known[1] + stage.space.count
    samples = options.samples_each * len(regions) if options.samples is None else options.samples
    sample_configs(list(regions.values()), ledger, samples, rng, guide)


def _block_plan(key: str, stage: Stage1) -> BlockPlan:
    """What stage 1 kept, and what it tried and left, as the plan says it."""
    space, kept = stage.space, stage.best
    noise = stage.least_gain
    regions = [_planned(space, kept, span, region, noise) for span, region in kept.items()]
    dropped = {s: t for t in stage.trials if t.kept and "drop" in t.move for s in set(t.before) - set(t.after)}
    regions += [_planned(space, kept, s, space.regions[s], noise, dropped.get(s)) for s in stage.tried - set(kept)]
    ordered = tuple(sorted(regions, key=lambda r: (r.start, r.stop)))
    left, planned = space.known({}), space.known(kept)
    return BlockPlan(key, space.scheme(kept).text(), space.count, ordered, left, planned)


def _planned(
    space: BlockSpace, kept: dict[Span, Region], span: Span, region: Region, noise: float, dropped: Trial | None = None
) -> PlannedRegion:
    """Beside the kept regions that do not overlap it. `dropped`: the move that took the region out of the choice.

    `noise`: microseconds that are no gain.
    """
    fused, config = space.ledger.best(region)
    others = {s: r for s, r in kept.items() if s[1] <= span[0] or s[0] >= span[1]}
    without, with_it = space.known(others), space.known({**others, span: region})
    left = without - (with_it - fused) if max(without, with_it) < float("inf") else None
    problem = space.ledger.problems.get(region.key, "")
    if span in kept:
        alone = (
            ""
            if left is not None
            else ", together with the other regions: the search ended before it was dropped alone"
        )
        reason = f"faster than what TensorRT makes of its operators{alone}"
    else:
        reason = problem or _why_not(fused, left, noise, dropped)
    operators = tuple(o.op for o in region.segment.operators)
    us = fused if fused < float("inf") else None
    template = region.instance.template
    return PlannedRegion(*span, region.segment.hash, operators, template, config, us, left, span in kept, reason)


def _why_not(fused: float, left: float | None, noise: float, dropped: Trial | None) -> str:
    if fused == float("inf"):
        return "it was not timed"
    if left is not None and fused > left:
        return "TensorRT is faster"
    if dropped is not None and dropped.gain > 0:
        others = f" and {len(dropped.before) - len(dropped.after) - 1} more" if dropped.move == "drop group" else ""
        return f"TensorRT is faster: without it{others} the block takes {dropped.gain:.1f} µs less"
    little = left is not None and left - fused <= noise
    return "no gain beyond the noise" if little else "another choice of regions is faster"
