"""Runs the grid on several processes: `python -m tests.grid.run [--jobs 2] [--only TEXT] [--again] [--write]`.

Outcomes are kept in build/grid/, where `tests.grid.table` reads them, and exported models in build/grid/exports/, so
that only the first run has to wait for the exporters. `--write` writes docs/grid.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from stof_models.grid import GridCase, grid

from benchmarks.peers import EXPORTS
from benchmarks.peers import RESULTS as PEERS
from tests.grid.outcome import STATUSES, Outcome, evaluate

RESULTS = Path(__file__).parents[2] / "build" / "grid" / "outcomes.jsonl"


def run_case(case: GridCase) -> Outcome:
    """One case in a folder of its own, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(case, Path(folder), EXPORTS)


def run_grid(cases: Iterable[GridCase], jobs: int) -> Iterator[Outcome]:
    """Outcomes as they are done. Processes are fresh (spawn): torch does not like to be forked."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_case, case) for case in cases]):
            yield future.result()


def load() -> list[Outcome]:
    """The stored outcomes in the grid's order, with those of the peers where they ran."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    outcomes = [Outcome.from_json(json.loads(line)) for line in lines]
    peers = json.loads(PEERS.read_text(encoding="utf-8")) if PEERS.exists() else {}
    for outcome in outcomes:
        outcome.peers = peers.get(outcome.name, {})
    order = {case.name: index for index, case in enumerate(grid())}
    return sorted((o for o in outcomes if o.name in order), key=lambda o: order[o.name])


def store(outcomes: Iterable[Outcome]) -> None:
    """Keeps outcomes for `load`."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("".join(json.dumps(o.to_json()) + "\n" for o in outcomes), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--again", action="store_true", help="only cases without outcome or with errors")
    parser.add_argument("--write", action="store_true", help="write docs/grid.md afterwards")
    arguments = parser.parse_args()
    stored = {outcome.name: outcome for outcome in load()}
    cases = [c for c in grid() if arguments.only in c.name and not (arguments.again and _settled(stored.get(c.name)))]
    cases.sort(key=lambda case: case.options.exporter, reverse=True)  # torchscript first: it is quick
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    start = time.perf_counter()
    for number, outcome in enumerate(run_grid(cases, arguments.jobs), 1):
        outcome.revision = revision
        stored[outcome.name] = outcome
        store(stored.values())
        print(f"{number}/{len(cases)} {describe(outcome)}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")
    if arguments.write:
        from tests.grid.table import write

        write()
    return 1 if any(o.errors for o in stored.values()) else 0


def _settled(outcome: Outcome | None) -> bool:
    return outcome is not None and not outcome.errors


def describe(outcome: Outcome) -> str:
    """One line."""
    if outcome.export_error:
        return f"{outcome.name}: {outcome.export_error}"
    counts = {s: sum(site.status == s for site in outcome.sites) for s in STATUSES}
    text = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    seconds = " ".join(f"{name} {value:.1f}" for name, value in outcome.seconds.items())
    return f"{outcome.name}: {text} ({seconds} s) {'; '.join(outcome.errors)}"


if __name__ == "__main__":
    sys.exit(main())
