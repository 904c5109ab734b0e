#!/usr/bin/env python3
"""The kernel selection model: its measurements, its calibration, and how good its picks are.

python benchmarks/selection.py measure      # on a GPU, with `make cuda` done: times every configuration of every case
python benchmarks/selection.py calibrate    # fits the times of the set `calibrate`, writes the device profile; no GPU
python benchmarks/selection.py evaluate     # scores picks on the set `evaluate`; no GPU
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "optimizer"), str(ROOT / "benchmarks")]

from attention_bench import record  # noqa: E402
from selection_bench import calibrate, judge, tables  # noqa: E402
from selection_bench.cases import SETS  # noqa: E402
from selection_bench.sweep import Planned, site_of, sweep  # noqa: E402
from stof_onnx.errors import StofError  # noqa: E402
from stof_onnx.kernels.configs import hopper_runs  # noqa: E402
from stof_onnx.kernels.device_profile import read_profile  # noqa: E402

LIBRARY = ROOT / "build" / "cuda" / "libstof_capi.so"
RESULTS = ROOT / "benchmarks" / "results" / "selection.jsonl"
PROFILE = ROOT / "benchmarks" / "results" / "selection_profile.json"  # fitted to RESULTS
DOCS = ROOT / "docs" / "benchmarks.md"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    m = commands.add_parser("measure", help="times every configuration of every case")
    m.add_argument("--set", choices=sorted(SETS), nargs="+", default=sorted(SETS))
    m.add_argument("--out", type=Path, default=RESULTS, help="JSONL to append to (%(default)s)")
    m.add_argument("--hopper-only", metavar="SET", help="of this set only block_sm90: older times of the others stay")
    m.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case starts")
    m.add_argument("--workers", type=int, default=8, help="processes that lower masks")
    m.add_argument("--commit", default="", help="what to record as the commit where the tree is no checkout")
    c = commands.add_parser("calibrate", help="writes a device profile")
    c.add_argument("--results", type=Path, default=RESULTS)
    c.add_argument("--out", type=Path, default=PROFILE)
    e = commands.add_parser("evaluate", help="scores the picks, beside Eq. 1 of the paper and fixed choices")
    e.add_argument("--results", type=Path, default=RESULTS)
    e.add_argument("--profile", type=Path, default=PROFILE)
    e.add_argument("--set", choices=sorted(SETS), default="evaluate")
    e.add_argument("--docs", action="store_true", help=f"also writes the tables into {DOCS.name}")
    a = p.parse_args()
    try:
        return {"measure": _measure, "calibrate": _calibrate, "evaluate": _evaluate}[a.command](a)
    except (StofError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _measure(a: argparse.Namespace) -> int:
    cases = []
    for name in a.set:
        shuffled = list(SETS[name])
        random.Random(0).shuffle(shuffled)  # a run that is cut off has seen some of everything
        if name == a.hopper_only:
            cases += [Planned(name, c, ("block_sm90",)) for c in shuffled if hopper_runs(site_of(c), 90)]
        else:
            cases += [Planned(name, c) for c in shuffled]
    return 1 if sweep(cases, LIBRARY, a.out, record.environment(a.commit), a.limit, a.workers) else 0


def _calibrate(a: argparse.Namespace) -> int:
    cases, environment = judge.read(a.results, "calibrate")
    for line in calibrate.write_profile(cases, environment, a.out):
        print(line)
    return 0


def _evaluate(a: argparse.Namespace) -> int:
    cases, environment = judge.read(a.results, a.set)
    profile = read_profile(a.profile.read_text(), str(a.profile))
    text = tables.report(cases, environment, profile)
    print(text)
    if a.docs:
        tables.write_between(DOCS, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
