"""Time and peak memory of mask encoding, each case in a fresh process.

    PYTHONPATH=optimizer python benchmarks/encode.py [CASE ...]

Dense cases start from a bool matrix in memory, which the peak includes; streamed ones from a row-band source, which is
timed with them. Exit code 1 if a 16384 x 16384 case takes more than 2 s or 1.5 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from stof_onnx.mask import EncodedMask, RowBands, decode_band, encode, encode_bands, retile, statistics
from stof_onnx.mask.sources import causal, window

LIMIT_SECONDS, LIMIT_MB = 2.0, 1536
_BLOCK = 64


def bigbird(size: int) -> RowBands:
    """Blocks of 64: neighbours, first and last block row and column, three random blocks a row."""
    n = size // _BLOCK
    rng = np.random.default_rng(0)
    blocks = [sorted({0, n - 1, i, max(i - 1, 0), min(i + 1, n - 1), *rng.integers(0, n, 3)}) for i in range(n)]

    def band(q0: int, q1: int) -> np.ndarray:
        rows = np.zeros((q1 - q0, size), bool)
        for q in range(q0, q1, _BLOCK):
            i, part = q // _BLOCK, rows[q - q0 : q - q0 + _BLOCK]
            if i in (0, n - 1):
                part[:] = True
            for j in blocks[i]:
                part[:, j * _BLOCK : (j + 1) * _BLOCK] = True
        return rows

    return band


def random(size: int, share: float) -> RowBands:
    """Every element with probability `share`, plus the diagonal."""
    rng = np.random.default_rng(0)

    def band(q0: int, q1: int) -> np.ndarray:
        rows = rng.random((q1 - q0, size), dtype=np.float32) < share
        rows[np.arange(q1 - q0), np.arange(q0, q1)] = True
        return rows

    return band


def longformer(size: int, width: int) -> RowBands:
    """A window, and the first `width` rows and columns."""
    near = window(size, size, width, width)

    def band(q0: int, q1: int) -> np.ndarray:
        rows = near(q0, q1)
        rows[:, :width] = True
        rows[: max(0, width - q0)] = True
        return rows

    return band


@dataclass(frozen=True)
class Case:
    size: int
    source: Callable[[int], RowBands]
    dense: bool


_MASKS: dict[str, Callable[[int], RowBands]] = {
    "causal": lambda s: causal(s, s),
    "window": lambda s: window(s, s, 256, 256),
    "longformer": lambda s: longformer(s, 128),
    "bigbird": bigbird,
    "random10": lambda s: random(s, 0.1),
}
CASES = {f"dense-{name}-16384": Case(16384, source, True) for name, source in _MASKS.items()}
CASES["dense-random10-16383"] = Case(16383, _MASKS["random10"], True)
CASES |= {f"streamed-{name}-131072": Case(131072, _MASKS[name], False) for name in ("causal", "window", "bigbird")}


def peak_mb() -> float:
    """The most memory this process has held so far, in MiB."""
    with open("/proc/self/status", encoding="utf-8") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def timed(step: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = step()
    return time.perf_counter() - start, result


def decode_by_bands(mask: EncodedMask) -> None:
    for q in range(0, mask.s_q, 64):
        decode_band(mask, q, min(q + 64, mask.s_q))


def measure(name: str) -> dict[str, float | int | str]:
    """Runs one case in this process; the peak is read right after encoding."""
    case = CASES[name]
    size, source = case.size, case.source(case.size)
    if case.dense:
        allowed = np.empty((size, size), bool)
        for q0 in range(0, size, 512):
            allowed[q0 : q0 + 512] = source(q0, min(q0 + 512, size))
        encode_s, mask = timed(lambda: encode(allowed))
    else:
        encode_s, mask = timed(lambda: encode_bands(source, size, size))
    assert isinstance(mask, EncodedMask)
    peak = peak_mb()
    stats_s, stats = timed(lambda: statistics(mask))
    validate_s, _ = timed(mask.validate)
    retile_s, _ = timed(lambda: retile(mask, 128, 128))
    decode_s, _ = timed(lambda: decode_by_bands(mask))
    return {
        "case": name,
        "encode_s": encode_s,
        "peak_mb": peak,
        "mask_mb": mask.nbytes / 2**20,
        "density": stats.density,  # type: ignore[attr-defined]
        "full": mask.n_full,
        "part": mask.n_part,
        "statistics_s": stats_s,
        "validate_s": validate_s,
        "retile_s": retile_s,
        "decode_s": decode_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    columns = ("encode_s", "peak_mb", "mask_mb", "density", "full", "part")
    columns += ("statistics_s", "validate_s", "retile_s", "decode_s")
    print(f"{'case':26}" + "".join(f"{column:>13}" for column in columns), flush=True)
    too_much = []
    for name in options.cases or CASES:
        child = subprocess.run(
            [sys.executable, __file__, "--measure", name], check=True, capture_output=True, text=True
        )
        row = json.loads(child.stdout)
        print(f"{name:26}" + "".join(f"{row[column]:13.4g}" for column in columns), flush=True)
        if CASES[name].dense and (row["encode_s"] > LIMIT_SECONDS or row["peak_mb"] > LIMIT_MB):
            too_much.append(name)
    verdict = f"above {LIMIT_SECONDS} s or {LIMIT_MB} MB: {', '.join(too_much)}" if too_much else "within the limits"
    print(f"dense 16384 x 16384 cases (limits {LIMIT_SECONDS} s, {LIMIT_MB} MB): {verdict}")
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
