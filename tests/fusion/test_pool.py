"""Several GPUs measure side by side, here as processes with a timer that knows the truth and says where it ran."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from stof_onnx.errors import StofError
from stof_onnx.fusion.search import Measurement, Region, SearchOptions, Timer, search
from stof_onnx.fusion.search.ledger import BudgetSpent, Ledger
from stof_onnx.fusion.search.pool import TimerPool
from stof_onnx.fusion.search.timer import ParallelTimer
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import Block

from tests.fusion.synthetic import CONFIGS, Synthetic, layer_block

GPUS = ("GPU-a", "3")


@dataclass
class _Device(Synthetic):
    """Writes a line a measurement: its GPU, what for, and when it began and ended. `deadly`: a configuration."""

    log: Path = field(default=Path())
    deadly: str = ""
    takes: float = 0.0

    def fused(self, region: Region, config: str) -> Measurement:
        if config == self.deadly:
            os._exit(1)
        return self._logged(super().fused(region, config))

    def left(self, piece: Segment) -> Measurement:
        return self._logged(super().left(piece))

    def _logged(self, found: Measurement) -> Measurement:
        begun = time.monotonic()
        time.sleep(self.takes)
        line = f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()} {begun} {time.monotonic()}\n"
        with self.log.open("a") as file:
            file.write(line)
        return found


def _make(broken: tuple[str, ...] = (), **options: object) -> Timer:
    if os.environ["CUDA_VISIBLE_DEVICES"] in broken:
        raise StofError("no such GPU", "a test")
    return _Device(**options)  # type: ignore[arg-type]


def _pool(block: Block, log: Path, **options: object) -> TimerPool:
    log.touch()
    return TimerPool(partial(_make, seed=3, log=log, **options), GPUS, [block], Synthetic(3))


@pytest.fixture(scope="module")
def block() -> Block:
    return layer_block()


def test_each_gpu_has_a_process_and_the_plan_is_the_same(block: Block, tmp_path: Path) -> None:
    alone = search([block], Synthetic(3), "fp16", SearchOptions(least_gain=0.0, samples=1000))
    with closing(_pool(block, tmp_path / "log")) as pool:
        assert isinstance(pool, ParallelTimer) and not isinstance(Synthetic(3), ParallelTimer)
        plan = search([block], pool, "fp16", SearchOptions(least_gain=0.0, samples=1000))
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    processes = {gpu: {pid for other, pid, *_ in lines if other == gpu} for gpu in GPUS}
    assert all(len(pids) == 1 for pids in processes.values()) and str(os.getpid()) not in {line[1] for line in lines}
    assert min(Counter(line[0] for line in lines).values()) >= len(lines) / 4
    assert plan.samples == len(lines) and plan.complete
    (planned,), (expected,) = plan.blocks.values(), alone.blocks.values()
    assert planned.planned_us <= 1.01 * expected.planned_us and planned.left_us == expected.left_us


def test_they_measure_at_the_same_time(block: Block, tmp_path: Path) -> None:
    with closing(_pool(block, tmp_path / "log", takes=0.2)) as pool:
        ledger = Ledger(pool)
        pieces = [Segment(block, i, i + 3) for i in range(6)]
        ledger.together(pieces)
        assert ledger.samples == 6
        assert ledger.seconds == pytest.approx(6 * Synthetic().seconds / len(GPUS)), "the time that passes"
        assert [ledger.left(piece) for piece in pieces] == [Synthetic(3).left(piece).us for piece in pieces]
        ledger.together(pieces)
        assert ledger.samples == 6, "nothing is timed twice"
    spans = [tuple(map(float, line.split()[2:])) for line in (tmp_path / "log").read_text().splitlines()]
    assert any(a < d and c < b for i, (a, b) in enumerate(spans) for c, d in spans[:i])


def test_a_process_that_dies_costs_one_time(block: Block, tmp_path: Path) -> None:
    with closing(_pool(block, tmp_path / "log", deadly=CONFIGS[0])) as pool:
        plan = search([block], pool, "fp16", SearchOptions(least_gain=0.0))
    assert plan.complete and plan.kept
    assert any("the process that measured on GPU" in note and "died" in note for note in plan.notes)
    assert all(r.config != CONFIGS[0] for p in plan.blocks.values() for r in p.regions if r.kept)


@pytest.mark.parametrize("broken", [GPUS[:1], GPUS])
def test_a_gpu_whose_process_does_not_start_is_left_out(
    block: Block, broken: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for each; where no process starts, this one measures."""
    alone = search([block], Synthetic(3), "fp16", SearchOptions(least_gain=0.0))
    with closing(_pool(block, tmp_path / "log", broken=broken)) as pool:
        plan = search([block], pool, "fp16", SearchOptions(least_gain=0.0))
    assert plan.complete and plan.kept and not plan.notes
    (planned,), (expected,) = plan.blocks.values(), alone.blocks.values()
    assert planned.left_us == expected.left_us
    used = {line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert used == set(GPUS) - set(broken)
    assert [r.getMessage().split()[1] for r in caplog.records if r.name.endswith("pool")] == list(broken)


def test_a_spent_budget_measures_nothing_more(block: Block, tmp_path: Path) -> None:
    with closing(_pool(block, tmp_path / "log")) as pool, pytest.raises(BudgetSpent):
        Ledger(pool, budget=0.0).together([Segment(block, 0, 3)])
    assert not (tmp_path / "log").read_text()


def test_blocks_travel_without_weights() -> None:
    """What a process gets: the same hashes and keys, and no data of weights."""
    block = layer_block(width=768)
    light = block.light()
    assert Segment(light, 0, len(light)).hash == Segment(block, 0, len(block)).hash
    assert sum(t.ByteSize() for t in light.tensors.initializers.values()) < 10_000
    assert sum(t.ByteSize() for t in block.tensors.initializers.values()) > 10_000_000
