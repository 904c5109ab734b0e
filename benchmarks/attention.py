#!/usr/bin/env python3
"""Times our attention kernels and their peers on the same masks; one entry point.

    python benchmarks/attention.py --set anchors                # a set, without what this commit already measured
    python benchmarks/attention.py --set paper --workers 8 --part 1/2 --limit 300   # half of them; run again to go on
    python benchmarks/attention.py --case bigbird-16x12x4096x64-12-float16 --peers flex128,fa4_128
    python benchmarks/attention.py --draw                       # docs/attention.png and the table of docs/benchmarks.md

Appends one line a case to benchmarks/results/attention.jsonl (see docs/benchmarks.md for the fields).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "optimizer"), str(ROOT / "benchmarks")]

from attention_bench import record  # noqa: E402
from attention_bench.cases import SETS, Case  # noqa: E402


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--set", choices=sorted(SETS), action="append", default=[], help="default: anchors; repeatable")
    p.add_argument("--case", action="append", default=[], help="only this case (its key); repeatable")
    p.add_argument("--part", default="1/1", help="i/n: the i-th of n parts of the cases, for several GPUs or runs")
    p.add_argument("--path", default="auto", choices=("auto", "sm80", "sm90", "row"), help="kernel family to time")
    p.add_argument("--peers", default="all", help="comma-separated peers, 'all' or 'none'")
    p.add_argument("--no-cold", action="store_true", help="skip the cold-L2 timings")
    p.add_argument("--budget-ms", type=float, default=150.0, help="device time of one timing's replays")
    p.add_argument("--peer-seconds", type=float, default=0.0, help="give a peer up on a case after so long (0: never)")
    p.add_argument("--workers", type=int, default=1, help="processes that share the GPU: one measures, others compile")
    p.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case starts")
    p.add_argument("--again", action="store_true", help="also measure what this commit has already measured")
    p.add_argument("--commit", default="", help="what to record as the commit where the tree is no checkout")
    p.add_argument("--out", type=Path, default=record.RESULTS)
    p.add_argument("--draw", action="store_true", help="draw the plot and the table from the results and stop")
    return p.parse_args()


def chosen(a: argparse.Namespace) -> list[Case]:
    """This part of the cases asked for, the longest first."""
    every = {c.key: c for cases in SETS.values() for c in cases}
    if unknown := [k for k in a.case if k not in every]:
        sys.exit(f"attention.py: no case {unknown[0]}; cases are {', '.join(sorted(every))}")
    part, _, parts = a.part.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        sys.exit(f"attention.py: --part {a.part} is not i/n with 1 <= i <= n")
    cases = [every[k] for k in a.case] or [c for name in a.set or ["anchors"] for c in SETS[name]]
    cases = list(dict.fromkeys(cases))
    random.Random(0).shuffle(cases)  # parts of about equal length
    return sorted(cases[int(part) - 1 :: int(parts)], key=lambda c: -c.batch * c.heads * c.seq**2)


def remaining(a: argparse.Namespace, commit: str) -> list[Case]:
    """`chosen` without what this commit has already measured."""
    done = {(x["case"], x["arch_path"]) for x in record.load(a.out) if x["commit"] == commit}
    return [c for c in chosen(a) if a.again or (c.key, a.path) not in done]


def start_worker(gate_file: Path | None) -> None:
    """What a process does before its first case."""
    from attention_bench.gate import gate

    gate.use(gate_file)


def run_case(
    case: Case, path: str, peer_names: tuple[str, ...], effort: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """The line of one case and the seconds it took."""
    from attention_bench import measure

    start = time.monotonic()
    return measure.measure(case, path, peer_names, measure.Effort(**effort)), time.monotonic() - start


def results(
    cases: list[Case], workers: int, limit: float, *args: Any
) -> Iterator[tuple[Case, dict[str, Any] | Exception, float]]:
    """Runs the cases here or in `workers` processes; a case that fails yields its exception."""
    begin = time.monotonic()
    if workers <= 1:
        for case in cases:
            if time.monotonic() - begin > limit:
                return
            try:
                yield case, *run_case(case, *args)
            except Exception as error:
                yield case, error, 0.0
        return
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "gate"
        # Each process compiles one kernel at a time: a pool of compilers in each would only cost start-up time.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (shared,))
        todo, running = list(cases), dict[Future[Any], Case]()
        try:
            while running or (todo and time.monotonic() - begin <= limit):
                while todo and len(running) < workers and time.monotonic() - begin <= limit:
                    case = todo.pop(0)
                    running[pool.submit(run_case, case, *args)] = case
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    case = running.pop(future)
                    error = future.exception()
                    if isinstance(error, Exception):
                        yield case, error, 0.0
                    else:
                        yield case, *future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def main() -> int:
    a = arguments()
    if a.draw:
        from attention_bench import draw

        draw.draw(record.newest(record.load(a.out)))
        return 0
    from attention_bench import peers

    names = {"all": peers.NAMES, "none": ()}.get(a.peers) or tuple(x for x in a.peers.split(",") if x != "none")
    env, wrong, begin = record.environment(a.commit), 0, time.monotonic()
    effort = {"cold": not a.no_cold, "budget_ms": a.budget_ms, "peer_seconds": a.peer_seconds}
    cases, done = remaining(a, env["commit"]), 0
    for case, line, seconds in results(cases, a.workers, a.limit, a.path, names, effort):
        done += 1
        if isinstance(line, Exception):
            print(f"{case.key:44s} FAILED {type(line).__name__}: {str(line)[:300]}", flush=True)
            wrong += 1
            continue
        record.append(a.out, {**env, "case": case.key, **line})
        best = min((t for n, t in line["peers"].items() if n in peers.GROUPS), default=float("nan"))
        print(
            f"{case.key:44s} ours {line['ours_us']:9.1f} us ({line['kernel']} {line['config']})  best peer {best:9.1f}"
            f"  floor {line['floor_us']:8.1f}  err {line['max_err']:.2g} (torch {line['ref_err']:.2g})"
            f"{'' if line['correct'] else '  WRONG'}  [{seconds:.0f} s, at {time.monotonic() - begin:.0f}]",
            flush=True,
        )
        wrong += not line["correct"]
    if done < len(cases):
        print(f"time is up, {len(cases) - done} cases are left; run the same command again to go on")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
