"""The two-stage search beside exhaustive and random search over the same space.

    python -m benchmarks.fusion_search MODEL.stof.onnx ... [--timer roofline|gpu] [--out FILE]

Exhaustive search times every region in every configuration and every piece that TensorRT could keep. Its table of
times is then what the others are asked on, so that all see the same times: the two-stage search once a seed, random
search with as many measurements as the two-stage search of that seed made. MODEL is an optimized model without
regions. One JSON line a kind of block and search:

    date, commit, timer, model, block (hash), operators, search, seed, measurements, us, over_best (us / best),
    seconds and build_seconds (exhaustive only), regions ([start, stop, template, configuration] of the choice)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search import Region, Timer
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.fusion.search.run import SearchOptions, search
from stof_onnx.fusion.segment import block_hash
from stof_onnx.fusion.sequence import Block
from stof_onnx.options import EngineWishes

from benchmarks.fusion_bench.baselines import exhaustive, random_search
from benchmarks.fusion_bench.models import model_blocks
from benchmarks.fusion_bench.table import Table

SEEDS = range(5)


def compare(block: Block, table: Table, precision: str, guide: Timer | None = None) -> Iterator[dict[str, Any]]:
    """The lines of one block."""
    begun, known = time.monotonic(), len(table.times)
    space = BlockSpace(block, Ledger(table))
    best, choice = exhaustive(space)
    made = list(table.times.values())[known:]
    spent = {
        "seconds": round(time.monotonic() - begun, 2),
        "build_seconds": round(sum(m.build_seconds for m in made), 2),
    }
    yield _line("exhaustive", None, space, best, choice, best) | spent
    for seed in SEEDS:
        plan = search([block], table, precision, SearchOptions(seed=seed), guide=guide)
        planned = plan.blocks.get(block_hash(block))
        kept = {(r.start, r.stop): r for r in planned.regions if r.kept} if planned else {}
        ledger = Ledger(table)
        mine = BlockSpace(block, ledger)
        for span, region in kept.items():
            ledger.fused(mine.regions[span], region.config)
        choice = {span: mine.regions[span] for span in kept}
        line = _line("two-stage", seed, mine, mine.total(choice), choice, best)
        yield line | {"measurements": plan.samples}
        drawn = BlockSpace(block, Ledger(table))
        us, found = random_search(drawn, plan.samples, random.Random(seed))
        yield _line("random", seed, drawn, us, found, best)


def _line(
    name: str, seed: int | None, space: BlockSpace, us: float, choice: dict[Span, Region], best: float
) -> dict[str, Any]:
    regions = [[*span, r.instance.template, space.ledger.best(r)[1]] for span, r in sorted(choice.items())]
    return {
        "search": name,
        "seed": seed,
        "measurements": space.ledger.samples,
        "us": round(us, 2),
        "over_best": round(us / best, 4) if best else None,
        "regions": regions,
    }


def _timer(arguments: argparse.Namespace) -> Timer:
    if arguments.timer == "roofline":
        return Roofline(arguments.precision)
    from stof_onnx.trt.region_timer import gpu_timer

    return gpu_timer(EngineWishes(precision=arguments.precision, timing_cache=arguments.timing_cache))


def main() -> None:
    """Appends the lines of every kind of block that has regions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--timer", choices=("roofline", "gpu"), default="roofline")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--timing-cache", type=Path)
    parser.add_argument("--largest", action="store_true", help="only the block with most operators of each model")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fusion_search.jsonl"))
    arguments = parser.parse_args()
    timer = _timer(arguments)
    table = Table(timer.name, timer)
    commit = os.environ.get("STOF_COMMIT") or _commit()
    for path in arguments.models:
        blocks = {block_hash(block): block for block in model_blocks(path)}
        if arguments.largest:
            blocks = dict([max(blocks.items(), key=lambda item: len(item[1]))])
        for key, block in blocks.items():
            if not BlockSpace(block, Ledger(table)).regions:
                continue
            for line in compare(block, table, arguments.precision, Roofline(arguments.precision)):
                now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
                about = {"date": now, "commit": commit, "timer": table.name, "model": path.name.partition(".")[0]}
                line = about | {"block": key, "operators": len(block)} | line
                print(json.dumps(line), flush=True)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
