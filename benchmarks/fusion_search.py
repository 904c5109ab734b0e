"""The two-stage search beside exhaustive and random search over the same space.

    python -m benchmarks.fusion_search MODEL.stof.onnx ... [--table FILE | --timer gpu] [--out FILE]
    python -m benchmarks.fusion_search MODEL.stof.onnx --table FILE --off 0.05

MODEL is an optimized model without regions. All see the same times: those of a table that benchmarks/fusion_space.py
measured on a GPU (one comparison for each timer in it that knows the model), else the analytic estimates, else those
that exhaustive search takes on this machine's GPU (`--timer gpu`). Exhaustive search times every region in every
configuration and every piece that TensorRT could keep. The two-stage search runs once a seed, as `optimize
--tune-budget` does, with the estimates as its guide; random search makes as many measurements as the two-stage search
of that seed, and then goes on until it is within 2 %. With `--off` the two-stage search runs on twenty tables in which
each time is up to that share higher or lower, drawn at random; that is printed only. One JSON line a search:

    date, commit, timer, model, search, seed, blocks (kinds), operators, measurements (distinct times asked for),
    seconds and build_seconds (that those took when they were measured), us (of all blocks), bare_us (without regions),
    over_best (us / best), within (random: measurements until 2 % over the best, null where it never got there),
    regions (of each kind of block: [start, stop, template, configuration])
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stof_onnx.errors import StofError
from stof_onnx.fusion.plan import FusionPlan
from stof_onnx.fusion.search import Timer
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.fusion.search.run import SearchOptions, search
from stof_onnx.fusion.sequence import Block
from stof_onnx.options import EngineWishes
from stof_onnx.trt.region_timer import GpuTimer, gpu_timer

from benchmarks.fusion_bench.baselines import Choice, RandomSearch, exhaustive, spaces_of, total_of
from benchmarks.fusion_bench.models import model_blocks
from benchmarks.fusion_bench.table import Table, read_tables

SEEDS, DRAWS = range(5), range(20)
WITHIN = 1.02
PROGRAMS = GpuTimer.programs  # the space is the one that `optimize` searches


def compare(
    blocks: Sequence[Block], table: Table, precision: str, guide: Timer | None = None
) -> Iterator[dict[str, Any]]:
    """The lines of one model."""
    ledger = Ledger(table)
    spaces = spaces_of(blocks, ledger)
    choices = {key: exhaustive(space)[1] for key, space in spaces.items()}
    best = total_of(spaces, choices)
    yield _line("exhaustive", None, blocks, ledger, choices, best)
    for seed in SEEDS:
        plan, line = _two_stage(seed, blocks, table, precision, best, guide)
        yield line
        drawn = RandomSearch(spaces_of(blocks, Ledger(table)), random.Random(seed))
        drawn.run(plan.samples)
        line = _line("random", seed, blocks, drawn.ledger, drawn.choices, best)
        drawn.run(len(ledger.times), WITHIN * best)
        yield line | {"within": drawn.ledger.samples if drawn.total <= WITHIN * best else None}


def _two_stage(
    seed: int, blocks: Sequence[Block], table: Table, precision: str, best: float, guide: Timer | None
) -> tuple[FusionPlan, dict[str, Any]]:
    """The search's plan, and its line."""
    plan = search(blocks, table, precision, SearchOptions(seed=seed), guide=guide)
    mine = Ledger(table)  # with the times of the plan's configurations only
    spaces = spaces_of(blocks, mine)
    choices: dict[str, Choice] = {key: {} for key in spaces}
    for key, planned in plan.blocks.items():
        for region in (r for r in planned.regions if r.kept):
            span = region.start, region.stop
            choices[key][span] = spaces[key].regions[span]
            mine.fused(choices[key][span], region.config)
    spent = {"measurements": plan.samples, "seconds": plan.seconds, "build_seconds": plan.build_seconds}
    return plan, _line("two-stage", seed, blocks, mine, choices, best) | spent


def draws(
    blocks: Sequence[Block], table: Table, precision: str, share: float, guide: Timer | None = None
) -> Iterator[dict[str, Any]]:
    """The lines of the two-stage search on tables in which each time is up to `share` higher or lower."""
    for seed in DRAWS:
        rng = random.Random(seed)
        times = {k: replace(m, us=m.us * rng.uniform(1 - share, 1 + share)) for k, m in sorted(table.times.items())}
        drawn = replace(table, times=times)
        spaces = spaces_of(blocks, Ledger(drawn))
        best = total_of(spaces, {key: exhaustive(space)[1] for key, space in spaces.items()})
        yield _two_stage(seed, blocks, drawn, precision, best, guide)[1]


def _line(
    name: str, seed: int | None, blocks: Sequence[Block], ledger: Ledger, choices: dict[str, Choice], best: float
) -> dict[str, Any]:
    line = {
        "search": name,
        "seed": seed,
        "blocks": len(choices),
        "operators": sum(map(len, blocks)),
        "measurements": ledger.samples,
        "seconds": round(ledger.seconds, 3),
        "build_seconds": round(ledger.build_seconds, 3),
    }
    spaces = spaces_of(blocks, ledger)
    us = total_of(spaces, choices)
    found = {
        key: [[*span, r.instance.template, ledger.best(r)[1]] for span, r in sorted(choice.items())]
        for key, choice in choices.items()
    }
    bare = total_of(spaces, {})
    return line | {"us": round(us, 2), "bare_us": round(bare, 2), "over_best": round(us / best, 4), "regions": found}


def _tables(arguments: argparse.Namespace, blocks: Sequence[Block]) -> list[Table]:
    """What the comparison of a model is made on."""
    if arguments.timer == "gpu":
        timer: Timer = gpu_timer(EngineWishes(precision=arguments.precision, timing_cache=arguments.timing_cache))
        return [Table(timer.name, timer)]
    if arguments.table is None:
        timer = Roofline(arguments.precision)
        return [Table(timer.name, timer)]
    return [table for table in read_tables(arguments.table).values() if _complete(table, blocks)]


def _complete(table: Table, blocks: Sequence[Block]) -> bool:
    """Whether a table has every time of the space of these blocks."""
    try:
        for space in spaces_of(blocks, Ledger(table)).values():
            exhaustive(space)
    except StofError as missing:
        print(f"left out: {missing}", flush=True)
        return False
    return True


def main() -> None:
    """Appends the lines of every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, help="times of benchmarks/fusion_space.py")
    parser.add_argument("--timer", choices=("roofline", "gpu"), default="roofline")
    parser.add_argument("--off", type=float, metavar="SHARE", help="of the table's times")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--timing-cache", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fusion_search.jsonl"))
    arguments = parser.parse_args()
    commit = os.environ.get("STOF_COMMIT") or _commit()
    for path in arguments.models:
        blocks = model_blocks(path)
        for table in _tables(arguments, blocks):
            table.programs = PROGRAMS
            if arguments.off is not None:
                lines = list(draws(blocks, table, arguments.precision, arguments.off, Roofline(arguments.precision)))
                print([(line["measurements"], line["over_best"]) for line in lines])
                continue
            for line in compare(blocks, table, arguments.precision, Roofline(arguments.precision)):
                now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
                about = {"date": now, "commit": commit, "timer": table.name, "model": path.name.partition(".")[0]}
                print(json.dumps({k: v for k, v in line.items() if k != "regions"}), flush=True)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(about | line) + "\n")


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
