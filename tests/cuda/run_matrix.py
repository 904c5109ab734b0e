"""Runs groups of the correctness matrix without pytest: `python -m tests.cuda.run_matrix LIBRARY GROUP... [--seed N]`.

Prints one line a failing case, and a summary. For boxes without the repository's test environment and for
compute-sanitizer.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from stof_onnx.kernels.capi import KernelLibrary

from tests.cuda import matrix
from tests.cuda.harness import Inputs, case_seed, check, run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument(
        "groups",
        nargs="+",
        help=f"{', '.join(matrix.GROUPS)}, [hopper_]fuzz:COUNT, every_instance, every_hopper_instance (run only)",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--every", type=int, default=1, help="take each n-th case")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    arguments = parser.parse_args()
    library = KernelLibrary(arguments.library)
    print(f"seed {arguments.seed}, {torch.cuda.get_device_name()}", flush=True)
    start, failed = time.time(), 0
    for name in arguments.groups:
        kind, _, count = name.partition(":")
        if count:
            cases = {"fuzz": matrix.fuzz, "hopper_fuzz": matrix.hopper_fuzz}[kind](int(count), arguments.seed)
        else:
            cases = getattr(matrix, name)() if name.startswith("every_") else matrix.GROUPS[name]()
        worst, done, began = 0.0, 0, time.time()
        for case in cases[:: arguments.every]:
            if time.time() - start > arguments.limit:
                print("time is up", flush=True)
                break
            try:
                if name.startswith("every_"):
                    run(library, Inputs(case, case_seed(case, arguments.seed)), fresh_workspace=True)
                else:
                    ours, theirs = check(library, case, arguments.seed)
                    worst = max(worst, ours / max(theirs, 1e-6))
            except Exception as error:
                failed += 1
                print(f"FAIL {str(error)[:400]}", flush=True)
                if "CUDA" in str(error) or "cuda" in str(error):
                    print("the device is lost", flush=True)
                    return 1
            done += 1
        print(
            f"{name}: {done} of {len(cases)} cases, worst error ratio {worst:.2f}, {time.time() - began:.1f} s",
            flush=True,
        )
    print(f"{failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
