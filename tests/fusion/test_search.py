"""The search: it finds what is best, keeps nothing that loses, times nothing twice, and keeps to its budget."""

from __future__ import annotations

import json
import math
import random

import pytest
from stof_onnx.fusion.piece_model import piece_key
from stof_onnx.fusion.plan import FusionPlan
from stof_onnx.fusion.scheme import Scheme
from stof_onnx.fusion.search import Measurement, Region, SearchOptions, search
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import BudgetSpent, Ledger
from stof_onnx.fusion.search.stage1 import Stage1
from stof_onnx.fusion.search.stage2 import sample_configs
from stof_onnx.fusion.segment import Segment, block_hash
from stof_onnx.fusion.sequence import Block

from benchmarks.fusion_bench.baselines import RandomSearch, exhaustive, spaces_of
from tests.fusion.synthetic import CONFIGS, Synthetic, layer_block

SEEDS = range(12)


@pytest.fixture(scope="module")
def block() -> Block:
    return layer_block()


def _plan(block: Block, timer: Synthetic, **options: object) -> FusionPlan:
    return search([block], timer, "fp16", SearchOptions(**{"least_gain": 0.0, **options}))  # type: ignore[arg-type]


def _true_time(block: Block, timer: Synthetic, plan: FusionPlan) -> float:
    """What the plan takes, by the timer itself and not by what the search noted."""
    space = BlockSpace(block, Ledger(timer))
    regions = [r for r in plan.blocks[block_hash(block)].regions if r.kept] if plan.blocks else []
    fused = sum(timer.fused(space.regions[r.start, r.stop], r.config).us for r in regions)
    return fused + sum(space.piece_us(piece) for piece in space.pieces([(r.start, r.stop) for r in regions]))


@pytest.mark.parametrize("seed", SEEDS)
def test_it_finds_the_optimum(block: Block, seed: int) -> None:
    """With every configuration of what it keeps sampled, within 2 % of the best of all choices, which timed more."""
    timer = Synthetic(seed)
    best, choice = exhaustive(BlockSpace(block, Ledger(timer)))
    everything = sum(timer.asked.values())
    timer.asked.clear()
    plan = _plan(block, timer, samples=1000)
    print("seed", seed, "best", best, sorted(choice), "measurements", everything, plan.samples)
    assert _true_time(block, timer, plan) <= 1.02 * best
    assert plan.samples < 0.7 * everything


@pytest.mark.parametrize("seed", SEEDS)
def test_it_keeps_nothing_that_loses(block: Block, seed: int) -> None:
    """Taking any kept region out of the plan makes the block slower, and no block is slower than without regions."""
    timer = Synthetic(seed, share=(0.7, 1.1))
    plan = _plan(block, timer)
    space = BlockSpace(block, Ledger(timer))
    total = _true_time(block, timer, plan)
    assert total <= space.total({})
    regions = [r for p in plan.blocks.values() for r in p.regions if r.kept]
    for dropped in regions:
        spans = [(r.start, r.stop) for r in regions if r is not dropped]
        without = sum(timer.fused(space.regions[r.start, r.stop], r.config).us for r in regions if r is not dropped)
        without += sum(space.piece_us(piece) for piece in space.pieces(spans))
        assert without > total
        assert dropped.left_us is not None and dropped.fused_us is not None
        assert dropped.left_us - dropped.fused_us == pytest.approx(without - total)


def test_where_every_region_loses_none_is_kept(block: Block) -> None:
    plan = _plan(block, Synthetic(1, share=(1.0, 1.5)))
    assert plan.kept == 0
    tried = [r for p in plan.blocks.values() for r in p.regions]
    assert tried and not any(r.kept for r in tried)
    assert all(r.reason for r in tried) and any(r.reason.startswith("TensorRT is faster") for r in tried)


def test_where_every_region_wins_all_operators_are_fused(block: Block) -> None:
    plan = _plan(block, Synthetic(2, share=(0.1, 0.1001)))
    (planned,) = plan.blocks.values()
    assert sum(r.stop - r.start for r in planned.regions if r.kept) == len(block)
    assert planned.planned_us < 0.2 * planned.left_us


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_timed_twice(block: Block, seed: int) -> None:
    timer = Synthetic(seed)
    plan = search([block, layer_block(), layer_block(width=64)], timer, "fp16", SearchOptions())
    assert max(timer.asked.values()) == 1
    assert plan.samples == sum(timer.asked.values())
    assert sum(p.count for p in plan.blocks.values()) == 3 and len(plan.blocks) == 2


def test_blocks_that_differ_share_what_is_equal_in_them(block: Block) -> None:
    """A block of two such layers asks for few times that the block of one has not."""
    both, apart = Synthetic(6), Synthetic(6)
    blocks = [block, layer_block(layers=2)]
    plan = search(blocks, both, "fp16", SearchOptions(least_gain=0.0), guide=Synthetic(6))
    alone = [search([one], apart, "fp16", SearchOptions(least_gain=0.0), guide=Synthetic(6)) for one in blocks]
    assert max(both.asked.values()) == 1
    assert plan.samples < 0.8 * sum(p.samples for p in alone)
    kept = {r.template for p in plan.blocks.values() for r in p.regions if r.kept}
    assert len(plan.blocks) == 2 and kept


def test_a_short_budget_goes_to_what_holds_most_of_the_model(block: Block) -> None:
    """Not to the first block, of which there is one."""
    timer = Synthetic(2, share=(0.1, 0.2), seconds=0.01)
    several = [layer_block(width=64), block, layer_block(), layer_block()]
    plan = search(several, timer, "fp16", SearchOptions(least_gain=0.0, budget=0.1))
    assert not plan.complete
    assert plan.blocks[block_hash(block)].count == 3 and list(plan.blocks) == [block_hash(block)]


def test_the_same_seed_gives_the_same_plan(block: Block) -> None:
    plans = [_plan(block, Synthetic(3), seed=5, samples=4) for _ in range(2)]
    assert plans[0] == plans[1]
    orders = {tuple(timer.asked) for seed in range(4) if _plan(block, timer := Synthetic(3), seed=seed)}
    assert len(orders) > 1, "other seeds sample otherwise"


@pytest.mark.parametrize("budget", [0.0, 0.05, 0.2, 0.5])
def test_the_time_budget_is_kept(block: Block, budget: float) -> None:
    timer = Synthetic(4, seconds=0.01)
    plan = _plan(block, timer, budget=budget)
    assert sum(timer.asked.values()) * 0.01 <= budget + 0.0101
    assert plan.seconds <= budget + 0.0101
    assert not plan.complete or budget == 0.5
    if plan.kept:
        assert _true_time(block, timer, plan) < BlockSpace(block, Ledger(timer)).total({})


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_ctrl_c_keeps_the_best_so_far(block: Block, share: float) -> None:
    """Interrupted at that share of its measurements."""
    timer = Synthetic(2, share=(0.1, 0.1001))
    whole = _plan(block, timer)
    timer = Synthetic(2, share=(0.1, 0.1001), interrupt_after=math.ceil(share * whole.samples))
    plan = _plan(block, timer)
    assert not plan.complete and plan.samples < whole.samples
    timer.interrupt_after = -1
    bare = BlockSpace(block, Ledger(timer)).total({})
    assert _true_time(block, timer, plan) <= bare
    assert plan.kept or share < 0.5


def _regions(block: Block, ledger: Ledger, count: int = 4) -> list[tuple[Region, int]]:
    return [(region, 1) for region in list(BlockSpace(block, ledger).regions.values())[:count]]


class _Flat(Synthetic):
    """Every region takes the same, whatever its configuration; only `steep` gets faster with every sample."""

    steep: str = ""

    def fused(self, region: Region, config: str) -> Measurement:
        self._note(region.key, config)
        taken = sum(count for (key, _), count in self.asked.items() if key == region.key)
        return Measurement(100.0 * 0.95**taken if region.key == self.steep else 100.0, self.seconds)


def test_stage_2_spends_its_samples_evenly_where_nothing_gains(block: Block) -> None:
    ledger = Ledger(_Flat())
    regions = _regions(block, ledger)
    assert sample_configs(regions, ledger, 8, random.Random(0)) == 8
    counts = [len(CONFIGS) - len(ledger.untried(region)) for region, _ in regions]
    assert counts == [2, 2, 2, 2]
    assert sample_configs(regions, ledger, 1000, random.Random(0)) == 4 * len(CONFIGS) - 8
    assert sample_configs(regions, ledger, 1000, random.Random(0)) == 0


def test_stage_2_spends_its_samples_where_they_gain(block: Block) -> None:
    """The others twice, which is when they have shown no gain; the one that gains all that it can take."""
    timer = _Flat()
    ledger = Ledger(timer)
    regions = _regions(block, ledger)
    timer.steep = regions[2][0].key
    sample_configs(regions, ledger, len(CONFIGS) + 6, random.Random(0))
    counts = [len(CONFIGS) - len(ledger.untried(region)) for region, _ in regions]
    assert counts == [2, 2, len(CONFIGS), 2]


def test_stage_2_leaves_out_what_is_as_fast_as_predicted(block: Block) -> None:
    """A guide that predicts 99 us expects nothing more of 100 us, one that predicts 90 us does."""

    class Guide(Synthetic):
        us: float

        def fused(self, region: Region, config: str) -> Measurement:
            return Measurement(self.us)

    guide = Guide()
    for guide.us, samples in ((99.0, 0), (90.0, 6)):
        ledger = Ledger(_Flat())
        regions = _regions(block, ledger)
        for region, _ in regions:
            ledger.fused(region, CONFIGS[0])
        assert sample_configs(regions, ledger, 6, random.Random(0), guide) == samples


def test_stage_2_leaves_out_what_would_lose_by_prediction(block: Block) -> None:
    """Only the first three configurations are predicted to take about as long as the best one."""

    class Guide(Synthetic):
        def fused(self, region: Region, config: str) -> Measurement:
            return Measurement(90.0 if config in CONFIGS[:3] else 140.0)

    ledger = Ledger(_Flat())
    regions = _regions(block, ledger)
    for region, _ in regions:
        ledger.fused(region, CONFIGS[0])
    assert sample_configs(regions, ledger, 1000, random.Random(0), Guide()) == 2 * len(regions)
    assert all(ledger.untried(region) == list(CONFIGS[3:]) for region, _ in regions)


class _NormLike(Synthetic):
    """A single norm takes this much more as a region than when it is left to TensorRT; GEMM regions gain."""

    more: float = 0.0

    def fused(self, region: Region, config: str) -> Measurement:
        self._note(region.key, config)
        gains = 60.0 if region.instance.gemms else 0.0
        return Measurement(sum(100.0 for _ in region.segment.operators) + self.more - gains)

    def left(self, piece: Segment) -> Measurement:
        self._note(piece_key(piece), "")
        return Measurement(100.0 * len(piece))


@pytest.mark.parametrize(("more", "stays"), [(-1.0, True), (-0.2, False), (0.0, False), (0.2, False)])
def test_a_region_that_gains_no_more_than_noise_is_dropped(block: Block, more: float, stays: bool) -> None:
    timer = _NormLike()
    timer.more = more
    plan = search([block], timer, "fp16", SearchOptions(least_gain=0.3))
    found = {(r.template, r.kept) for p in plan.blocks.values() for r in p.regions if r.template == "norm"}
    assert ("norm", True) in found if stays else found == {("norm", False)}
    assert any(r.kept and r.template == "gemm_epilogue" for p in plan.blocks.values() for r in p.regions)
    reasons = {r.reason for p in plan.blocks.values() for r in p.regions if r.template == "norm" and not r.kept}
    assert stays or reasons <= {"no gain beyond the noise", "TensorRT is faster", "another choice of regions is faster"}


def test_a_region_that_gains_less_than_another_one_says_so(block: Block) -> None:
    """A GEMM that gains as a region, and gains more as a part of a larger one, is not called noise."""

    class Growing(Synthetic):
        def fused(self, region: Region, config: str) -> Measurement:
            return Measurement(100.0 * len(region.segment.operators) - len(region.segment.operators) ** 2)

        def left(self, piece: Segment) -> Measurement:
            return Measurement(100.0 * len(piece))

    plan = search([block], Growing(), "fp16", SearchOptions())
    others = [r for p in plan.blocks.values() for r in p.regions if not r.kept]
    assert others and {r.reason for r in others} == {"another choice of regions is faster"}
    assert any(r.left_us is not None and r.fused_us is not None and r.left_us - r.fused_us > 0.3 for r in others)


def test_a_block_starts_from_what_an_earlier_one_has_shown(block: Block) -> None:
    """Two layers after one: the choice of the first layer is a start, and each of its regions is timed once."""
    timer = Synthetic(2, share=(0.1, 0.1001))
    ledger = Ledger(timer)
    first = Stage1(BlockSpace(block, ledger), guide=timer)
    first.run()
    assert first.trials[0].move == "initial"
    second = Stage1(BlockSpace(layer_block(layers=2), ledger), guide=timer)
    second.run()
    assert second.trials[0].move == "known"
    assert set(first.best) <= set(second.trials[0].after)


def test_what_promises_little_for_the_whole_model_is_not_tried(block: Block) -> None:
    """In a block that is a small part of the model only the start and drops are timed."""
    exact = Synthetic(5)
    alone, part = (Stage1(BlockSpace(block, Ledger(Synthetic(5))), guide=exact, elsewhere=us) for us in (0.0, 1e6))
    alone.run()
    part.run()
    assert {t.move for t in part.trials} == {"initial", "drop"}
    assert {t.move for t in alone.trials} - {"initial", "drop"}
    assert part.space.ledger.samples < alone.space.ledger.samples


def test_pieces_and_bits(block: Block) -> None:
    space = BlockSpace(block, Ledger(Synthetic()))
    assert [block.operators[c].op for c in space.cuts] == ["MatMul"] * 3
    assert space.pieces([]) == [(0, 15)]
    assert space.pieces([(3, 4)]) == [(0, 3), (4, 15)]
    assert space.pieces([(0, 3), (4, 11)]) == [(3, 4), (11, 15)]
    scheme = space.scheme([(0, 3), (4, 11)])
    assert scheme.spans == ((0, 3), (3, 4), (4, 11), (11, 15))
    assert Scheme.parse(scheme.text()) == scheme


def test_a_spent_ledger_still_tells_what_it_knows(block: Block) -> None:
    ledger = Ledger(Synthetic(), budget=0.01)
    space = BlockSpace(block, ledger)
    region = next(iter(space.regions.values()))
    time = ledger.fused(region, CONFIGS[0])
    with pytest.raises(BudgetSpent):
        ledger.fused(region, CONFIGS[1])
    assert ledger.fused(region, CONFIGS[0]) == time == ledger.best(region)[0]


def test_random_search_keeps_to_its_measurements(block: Block) -> None:
    ledger = Ledger(Synthetic(7))
    drawn = RandomSearch(spaces_of([block], ledger), random.Random(0))
    drawn.run(40)
    (space,) = drawn.spaces.values()
    assert 40 <= ledger.samples < 40 + 2 * len(block)
    (choice,) = drawn.choices.values()
    assert drawn.total == space.total(choice) < space.total({})
    drawn.run(10_000, enough=1e9)
    assert ledger.samples < 40 + 2 * len(block), "it has enough already"


def test_what_can_not_be_timed_is_left_alone(block: Block) -> None:
    """A piece that TensorRT does not build has no time to compare with: no region is kept, and the plan says why."""

    class Failing(Synthetic):
        def left(self, piece: Segment) -> Measurement:
            return Measurement(float("inf"), 0.01, problem="TensorRT built no engine")

    plan = _plan(block, Failing(1))
    assert plan.kept == 0 and plan.complete
    assert plan.notes == ("TensorRT built no engine",)


def test_a_region_that_does_not_run_is_not_kept(block: Block) -> None:
    class Failing(Synthetic):
        def fused(self, region: Region, config: str) -> Measurement:
            if region.instance.gemms:
                return Measurement(float("inf"), 0.01, problem="no such kernel")
            return super().fused(region, config)

    timer = Failing(1, share=(0.1, 0.2))
    plan = _plan(block, timer)
    kept = [r for p in plan.blocks.values() for r in p.regions if r.kept]
    assert kept and all(r.template != "gemm_epilogue" for r in kept)
    left = [r for p in plan.blocks.values() for r in p.regions if r.template == "gemm_epilogue"]
    assert left and all(r.reason == "no such kernel" and r.fused_us is None for r in left)
    json.dumps(plan.to_json(), allow_nan=False)


class _Guess(Synthetic):
    """Predictions: everything up to 20 % too high or too low, and TensorRT's pieces all a fifth too fast."""

    def fused(self, region: Region, config: str) -> Measurement:
        return self._wrong(super().fused(region, config), region.key + config)

    def left(self, piece: Segment) -> Measurement:
        return self._wrong(super().left(piece), piece_key(piece), 0.8)

    def _wrong(self, true: Measurement, key: str, share: float = 1.0) -> Measurement:
        return Measurement(true.us * share * self._rng(f"guess {key}").uniform(0.8, 1.2))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_guide_saves_measurements(block: Block, seed: int) -> None:
    """With rough predictions: close to the best of all choices, for a quarter of its measurements."""
    timer = Synthetic(seed)
    best, _ = exhaustive(BlockSpace(block, Ledger(timer)))
    everything = sum(timer.asked.values())
    few = search([block], timer, "fp16", SearchOptions(least_gain=0.0), guide=_Guess(seed))
    print("seed", seed, "over the best", _true_time(block, timer, few) / best, few.samples, "of", everything)
    assert _true_time(block, timer, few) <= 1.04 * best and few.samples <= everything / 3
    more = search([block], timer, "fp16", SearchOptions(least_gain=0.0, samples=1000), guide=_Guess(seed))
    assert _true_time(block, timer, more) <= 1.02 * best


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_guide_decides_nothing(block: Block, seed: int) -> None:
    """It costs gains, but what is kept has been measured, and so has dropping it."""
    timer = Synthetic(seed)
    misled = search([block], timer, "fp16", SearchOptions(least_gain=0.0), guide=Synthetic(seed, share=(0.1, 0.1)))
    space = BlockSpace(block, Ledger(timer))
    assert _true_time(block, timer, misled) <= space.total({})
    for dropped in (r for p in misled.blocks.values() for r in p.regions if r.kept):
        assert dropped.left_us is not None and dropped.fused_us is not None and dropped.fused_us < dropped.left_us


def test_it_says_how_far_it_is(block: Block) -> None:
    said: list[tuple[str, float]] = []
    search(
        [block], Synthetic(2), "fp16", SearchOptions(budget=9.0), watch=lambda text, share: said.append((text, share))
    )
    assert said[0] == ("block 1 of 1", 0.0) and "configurations" in {text for text, _ in said}
    assert any("µs of" in text and "s left" in text for text, _ in said)
    assert [share for _, share in said] == sorted(share for _, share in said)
