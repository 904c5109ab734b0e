#!/usr/bin/env python3
"""Times our attention kernels and their peers on the same masks; one entry point.

    python benchmarks/attention.py --set anchors                # a set, without what this commit already measured
    python benchmarks/attention.py --set paper --limit 300      # stop after 300 s; run again to go on
    python benchmarks/attention.py --case bigbird-16x12x4096x64-12-float16 --peers flex128,fa4_128
    python benchmarks/attention.py --draw                       # docs/attention.png and the table of docs/benchmarks.md

Appends one line a case to benchmarks/results/attention.jsonl (see docs/benchmarks.md for the fields).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "optimizer"), str(ROOT / "benchmarks")]

from attention_bench import record  # noqa: E402
from attention_bench.cases import SETS, Case  # noqa: E402


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--set", choices=sorted(SETS), default="anchors")
    p.add_argument("--case", action="append", default=[], help="only this case (its key); repeatable")
    p.add_argument("--path", default="auto", choices=("auto", "sm80", "sm90", "row"), help="kernel family to time")
    p.add_argument("--peers", default="all", help="comma-separated peers, 'all' or 'none'")
    p.add_argument("--no-cold", action="store_true", help="skip the cold-L2 timings")
    p.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case starts")
    p.add_argument("--again", action="store_true", help="also measure what this commit has already measured")
    p.add_argument("--commit", default="", help="what to record as the commit where the tree is no checkout")
    p.add_argument("--out", type=Path, default=record.RESULTS)
    p.add_argument("--draw", action="store_true", help="draw the plot and the table from the results and stop")
    return p.parse_args()


def chosen(a: argparse.Namespace) -> list[Case]:
    every = {c.key: c for cases in SETS.values() for c in cases}
    if unknown := [k for k in a.case if k not in every]:
        sys.exit(f"attention.py: no case {unknown[0]}; cases are {', '.join(sorted(every))}")
    return [every[k] for k in a.case] if a.case else SETS[a.set]


def main() -> int:
    a = arguments()
    if a.draw:
        from attention_bench import draw

        draw.draw(record.newest(record.load(a.out)))
        return 0
    from attention_bench import measure, peers

    names = {"all": peers.NAMES, "none": ()}.get(a.peers) or tuple(x for x in a.peers.split(",") if x != "none")
    env, start, wrong = record.environment(a.commit), time.monotonic(), 0
    done = {(x["case"], x["arch_path"]) for x in record.load(a.out) if x["commit"] == env["commit"]}
    for case in chosen(a):
        if not a.again and (case.key, a.path) in done:
            continue
        if time.monotonic() - start > a.limit:
            print("time is up; run the same command again to go on")
            break
        t0 = time.monotonic()
        line = {**env, "case": case.key, **measure.measure(case, a.path, names, not a.no_cold)}
        record.append(a.out, line)
        best = min((t for n, t in line["peers"].items() if n in peers.GROUPS), default=float("nan"))
        print(
            f"{case.key:44s} ours {line['ours_us']:9.1f} us ({line['kernel']} {line['config']})  best peer {best:9.1f}"
            f"  floor {line['floor_us']:8.1f}  err {line['max_err']:.2g} (torch {line['ref_err']:.2g})"
            f"{'' if line['correct'] else '  WRONG'}  [{time.monotonic() - t0:.0f} s]",
            flush=True,
        )
        wrong += not line["correct"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
