#!/usr/bin/env python3
"""Every kernel configuration on many cases, and how good the selection model's picks among them are.

python benchmarks/selection.py measure --set evaluate   # on a GPU, with `make cuda` done
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "optimizer"), str(ROOT / "benchmarks")]

from attention_bench import record  # noqa: E402
from selection_bench.cases import SETS  # noqa: E402
from selection_bench.sweep import sweep  # noqa: E402

LIBRARY = ROOT / "build" / "cuda" / "libstof_capi.so"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=("measure",))
    p.add_argument("--set", choices=sorted(SETS), nargs="+", default=["evaluate"])
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case starts")
    p.add_argument("--workers", type=int, default=8, help="processes that lower masks")
    p.add_argument("--commit", default="", help="what to record as the commit where the tree is no checkout")
    a = p.parse_args()
    cases = []
    for name in a.set:
        shuffled = list(SETS[name])
        random.Random(0).shuffle(shuffled)  # a run that is cut off has seen some of everything
        cases += [(name, case) for case in shuffled]
    return 1 if sweep(cases, LIBRARY, a.out, record.environment(a.commit), a.limit, a.workers) else 0


if __name__ == "__main__":
    sys.exit(main())
