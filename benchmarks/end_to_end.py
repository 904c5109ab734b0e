"""Encoders end to end on TensorRT: the plain engine beside the one with stof plugins.

    python -m benchmarks.end_to_end [--case window:16x2048 ...] [--out benchmarks/results/end_to_end.jsonl]

Each case goes through the product: an encoder in an exporter's form (opset 17, dense additive mask, separate Q, K and V
projections) is written, `optimize` replaces its attentions, both engines are built by the same code with the same
flags, checked against ONNX Runtime in float32 on the first batch entry (from 16384 on: float64 on sampled rows, one
layer), and timed by CUDA-graph replay. A case is MASK:BxS or MASK:BxSxLAYERS. One JSON line a case:

    date, commit, gpu, trt, tactic_sources, model, mask, B, S, layers, precision, fusion, plain_ms, stof_ms, speedup,
    kept, plain_mem_mb, stof_mem_mb, build_s, err_plain, err_stof (relative to the largest value), mask_bytes (in the
    engine), dense_mask_bytes, kernel, layers_us (with --layers-table)

`tactic_sources` is what STOF_TRT_TACTICS restricts both engines to.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from stof_onnx import pipeline
from stof_onnx.options import DimRange, EngineWishes, OptimizeOptions
from stof_onnx.progress import Progress
from stof_onnx.trt import availability, choose, cuda
from stof_onnx.trt.build import BuildOptions, tactic_sources
from stof_onnx.trt.engine_step import find_plugin_library
from stof_onnx.verify.session import Runner

from benchmarks.encoder import EncoderSpec, build_encoder, make_mask
from benchmarks.sampled_rows import sampled_output

CASES = ("window:16x2048", "bigbird:16x2048", "longformer:16x2048", "causal:16x2048", "window:8x4096", "bigbird:8x4096",
         "longformer:8x4096", "causal:8x4096", "window:8x512", "window:1x4096", "window:1x128")  # fmt: skip


_MOST_SCORES, _SAMPLED = 1 << 29, 192  # scores of one batch entry that ONNX Runtime may hold; rows beyond that

Known = dict[tuple[int, int, int], tuple[str, choose.Candidate]]


def run_case(
    kind: str, batch: int, seq: int, layers: int, known: Known, arguments: argparse.Namespace
) -> dict[str, object]:
    """Builds, checks and times one case; `known`: plain engines of earlier cases."""
    spec = EncoderSpec(layers, 768, 12, batch, seq, seed=arguments.seed)
    mask = make_mask(kind, seq)
    with tempfile.TemporaryDirectory() as name:
        source, portable = (Path(name) / file for file in ("encoder.onnx", "encoder.stof.onnx"))
        onnx.save(build_encoder(spec, mask), str(source))
        wishes = OptimizeOptions(verify=False, engine=EngineWishes(wanted=False))
        report = pipeline.optimize(source, portable, wishes, Progress())
        assert report.replaced == layers, report.refused
        x = np.random.default_rng(arguments.seed + 1).standard_normal((batch, seq, 768), np.float32)
        profile = {"x": tuple(DimRange(n, n, n) for n in x.shape)}
        options = BuildOptions(arguments.precision, profile, find_plugin_library(), timing_cache=arguments.timing_cache)
        reference = _reference(spec, mask, arguments.seed) if arguments.check else None
        earlier = known.get((batch, seq, layers)) if arguments.plain_once else None
        mask_of_plain, plain = earlier or (kind, None)
        found = choose.race(source, portable, options, [{"x": x}], reference, plain)
        known[batch, seq, layers] = mask_of_plain, found.plain
        line = _line(kind, spec, found, arguments) | {"plain_mask": mask_of_plain}
        if arguments.layers_table:
            longest = sorted(found.stof.layers.items(), key=lambda item: -item[1])[:14]
            line["layers_us"] = {n[:160]: round(t, 1) for n, t in longest}
        return line


def _reference(spec: EncoderSpec, mask: np.ndarray, seed: int) -> choose.Reference:
    """ONNX Runtime on the first batch entry (the others do not influence it); sampled rows of it where it is large."""
    if spec.heads * len(mask) ** 2 > _MOST_SCORES:
        rows = np.sort(np.random.default_rng(seed + 2).choice(len(mask), _SAMPLED, replace=False))
        return lambda feeds: {"y": sampled_output(replace(spec, batch=1), mask, feeds["x"][:1], rows)}

    def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        single = Runner(build_encoder(replace(spec, batch=1), mask), Path())
        return single.run({"x": feeds["x"][:1]})

    return run


def _line(kind: str, spec: EncoderSpec, found: choose.Race, arguments: argparse.Namespace) -> dict[str, object]:
    plain, stof = found.plain, found.stof
    speedup = plain.timing.median / stof.timing.median if plain.timing and stof.timing else None
    assert stof.lowered is not None
    site = stof.lowered.sites[0]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("STOF_COMMIT") or _commit(),
        "gpu": cuda.name(),
        "trt": availability.tensorrt().__version__,
        "tactic_sources": tactic_sources(),
        "model": "encoder-768",
        "mask": kind,
        "B": spec.batch,
        "S": spec.seq,
        "layers": spec.layers,
        "precision": arguments.precision,
        "fusion": False,
        "plain_ms": plain.timing and round(plain.timing.median, 4),
        "stof_ms": stof.timing and round(stof.timing.median, 4),
        "speedup": speedup and round(speedup, 3),
        "cuda_graph": bool(plain.timing and stof.timing and plain.timing.graph and stof.timing.graph),
        "kept": found.winner().kind,
        "plain_mem_mb": round(plain.memory / 2**20, 1),
        "stof_mem_mb": round(stof.memory / 2**20, 1),
        "plain_engine_mb": plain.engine and round(len(plain.engine.data) / 2**20, 1),
        "stof_engine_mb": stof.engine and round(len(stof.engine.data) / 2**20, 1),
        "build_s": [c.engine and round(c.engine.seconds, 1) for c in found.candidates],
        "err_plain": plain.error and plain.error.relative,
        "err_stof": stof.error and stof.error.relative,
        "mask_bytes": site.mask_bytes,
        "dense_mask_bytes": site.dense_mask_bytes,
        "kernel": site.kernel,
        "problems": [c.problem for c in found.candidates if c.problem],
    }


def _commit() -> str:
    try:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def main() -> None:
    """Runs the cases and appends a line for each, at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="MASK:BxS[xLAYERS]", help=f"default: {', '.join(CASES)}")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--precision", default="fp16", choices=("fp16", "fp32"))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="against ONNX Runtime")
    parser.add_argument("--layers-table", action="store_true", help="per-layer times of the kept stof engine")
    parser.add_argument(
        "--plain-once",
        action="store_true",
        help="time the plain engine of each size with its first mask only (`plain_mask`): it adds whatever mask alike",
    )
    parser.add_argument("--timing-cache", type=Path, help="shared by all builds")
    parser.add_argument("--budget", type=float, default=1e9, help="start no further case after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/end_to_end.jsonl"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    start, known = time.monotonic(), Known()
    for case in arguments.case or CASES:
        if time.monotonic() - start > arguments.budget:
            print(f"out of time before {case}", flush=True)
            break
        kind, sizes = case.split(":")
        batch, seq, layers = (*map(int, sizes.split("x")), arguments.layers)[:3]
        begun = time.monotonic()
        try:
            line = run_case(kind, batch, seq, layers, known, arguments)
        except Exception as error:  # the next case may still run
            line = {"mask": kind, "B": batch, "S": seq, "failed": f"{type(error).__name__}: {error}"}
        line["seconds"] = round(time.monotonic() - begun, 1)
        print(json.dumps(line), flush=True)
        with arguments.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
