"""Time and peak memory of `stof-onnx optimize --no-verify`: a 1.3-billion-parameter GPT, and BERT-base at S = 1024.

    python -m benchmarks.optimize [--dtype fp32] [--folder DIR] [gpt] [bert]

Each run is a fresh process; its peak is the kernel's own count (ru_maxrss), which leaves the page cache out. The limits
are those the project promises: 90 s and 1.6 times the file size for the GPT, 15 s for BERT-base.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LIMITS = {"gpt": (90.0, 1.6), "bert": (15.0, None)}
_CHILD = """
import json, resource, sys, time
from stof_onnx.cli import main
start = time.perf_counter()
code = main(["optimize", sys.argv[1], "-o", sys.argv[2], "--no-verify", "--report", sys.argv[3]])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("RESULT " + json.dumps({"code": code, "seconds": time.perf_counter() - start, "peak": peak}))
"""


def main() -> int:
    """Prints one line for each case; exit code 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(LIMITS)} (default: all)")
    parser.add_argument("--dtype", choices=("fp16", "fp32"), default="fp32", help="of the GPT's weights")
    parser.add_argument("--folder", help="where the models go (default: a temporary folder)")
    arguments = parser.parse_args()
    unknown = set(arguments.cases) - set(LIMITS)
    if unknown:
        parser.error(f"unknown case: {', '.join(sorted(unknown))}")
    failed = False
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for case in arguments.cases or LIMITS:
            source = Path(folder) / f"{case}.onnx"
            _export(case, source, arguments.dtype)
            failed |= not _run(case, source, Path(folder))
    return int(failed)


def _run(case: str, source: Path, folder: Path) -> bool:
    target, report = folder / f"{case}.stof.onnx", folder / f"{case}.report.json"
    command = [sys.executable, "-c", _CHILD, str(source), str(target), str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        print(f"{case}: failed\n{done.stdout}{done.stderr}")
        return False
    result = json.loads(line.removeprefix("RESULT "))
    attention = json.loads(report.read_text())["attention"]
    size = sum(f.stat().st_size for f in (source, source.with_name(f"{source.name}.data")) if f.exists())
    seconds, share = LIMITS[case]
    ratio = result["peak"] / size
    good = result["code"] == 0 and result["seconds"] <= seconds and (share is None or ratio <= share)
    print(
        f"{case}: {result['seconds']:.1f} s (limit {seconds:g}), peak {result['peak'] / 2**20:.0f} MiB = "
        f"{ratio:.2f} x file of {size / 2**20:.0f} MiB (limit {share or 'none'}), "
        f"{attention['replaced']} of {attention['found']} replaced, {'ok' if good else 'MISSED'}",
        flush=True,
    )
    for file in folder.glob(f"{case}.*"):
        file.unlink()
    return good


def _export(case: str, path: Path, dtype: str) -> None:
    """A real export of transformers with random weights (the GPT's data is drawn on disk)."""
    model = {
        "gpt": ["gpt2", "--preset", "gpt-1.3b", "--dtype", dtype],
        "bert": ["bert", "--preset", "bert-base", "--mask", "bigbird", "--seq", "1024"],
    }[case]
    command = [sys.executable, "-m", "stof_models.cli", *model, "-o", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    sys.exit(main())
