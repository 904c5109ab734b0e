"""Encoders end to end on TensorRT: the plain engine beside the one with stof plugins.

    python -m benchmarks.end_to_end [--case window:16x2048 ...] [--jobs 8] [--out benchmarks/results/end_to_end.jsonl]

Each case goes through the product: an encoder in an exporter's form (opset 17, dense additive mask, separate Q, K and V
projections) is written, `optimize` replaces its attentions, both engines are built by the same code with the same
flags, checked against ONNX Runtime in float32 on the first batch entry (from 16384 on: float64 on sampled rows, one
layer), and timed by CUDA-graph replay. A case is MASK:BxS or MASK:BxSxLAYERS. With `--jobs` the cases are taken in
waves: all engines of a wave are built side by side, then each is timed with the GPU to itself. One JSON line a case:

    date, commit, gpu, trt, tactic_sources, model, mask, B, S, layers, precision, fusion, plain_ms, stof_ms, speedup,
    kept, plain_mem_mb, stof_mem_mb, build_s, err_plain, err_stof (relative to the largest value), mask_bytes (in the
    engine), dense_mask_bytes, kernel, layers_us and plain_layers_us (with --layers-table)

With `--tune-budget` the fused regions of each size are searched first, and each case has a second line with `fusion`:
`stof_ms` is the engine with regions then, `attention_ms` that without, `gain` the quotient.

`tactic_sources` is what STOF_TRT_TACTICS restricts both engines to.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
from rich.console import Console
from stof_onnx import pipeline
from stof_onnx.options import DimRange, EngineWishes, FusionWishes, OptimizeOptions
from stof_onnx.progress import Progress
from stof_onnx.summary import print_report
from stof_onnx.trt import availability, choose, cuda, turns
from stof_onnx.trt.build import BuildOptions, BuiltEngine, tactic_sources
from stof_onnx.trt.engine_step import find_plugin_library
from stof_onnx.verify.session import Runner

from benchmarks.encoder import EncoderSpec, build_encoder, make_mask
from benchmarks.sampled_rows import sampled_output

CASES = ("window:16x2048", "longformer:16x2048", "bigbird:16x2048", "causal:16x2048", "window:8x4096",
         "longformer:8x4096", "bigbird:8x4096", "causal:8x4096", "window:8x512", "longformer:8x512", "bigbird:8x512",
         "causal:8x512", "window:1x4096", "longformer:1x4096", "bigbird:1x4096", "causal:1x4096", "window:1x128",
         "causal:1x128", "window:1x16384x1", "bigbird:1x16384x1")  # fmt: skip

_HELPERS = 4
_MOST_SCORES, _SAMPLED = 1 << 29, 192  # scores of one batch entry that ONNX Runtime may hold; rows beyond that


@dataclass(frozen=True)
class Case:
    """An encoder with a mask."""

    kind: str
    batch: int
    seq: int
    layers: int

    @staticmethod
    def parse(text: str, layers: int) -> Case:
        kind, sizes = text.split(":")
        return Case(kind, *(*map(int, sizes.split("x")), layers)[:3])

    @property
    def size(self) -> tuple[int, int, int]:
        return self.batch, self.seq, self.layers

    def spec(self, seed: int) -> EncoderSpec:
        return EncoderSpec(self.layers, 768, 12, self.batch, self.seq, seed=seed)

    def feeds(self, seed: int) -> dict[str, np.ndarray]:
        return {"x": np.random.default_rng(seed + 1).standard_normal((self.batch, self.seq, 768), np.float32)}

    def folder(self, arguments: argparse.Namespace) -> Path:
        return Path(arguments.work) / f"{self.kind}-{self.batch}x{self.seq}x{self.layers}"


def prepare(case: Case, arguments: argparse.Namespace) -> None:
    """Writes the encoder and what `optimize` makes of it. Needs no GPU; runs in a process of its own."""
    folder = case.folder(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    source, portable = folder / "encoder.onnx", folder / "encoder.stof.onnx"
    onnx.save(build_encoder(case.spec(arguments.seed), make_mask(case.kind, case.seq)), str(source))
    fusion = FusionWishes(plan=plan_of(case, arguments) if arguments.tune_budget else None)
    wishes = OptimizeOptions(verify=False, engine=EngineWishes(wanted=False), fusion=fusion)
    report = pipeline.optimize(source, portable, wishes, Progress())
    assert report.replaced == case.layers, report.refused


def plan_of(case: Case, arguments: argparse.Namespace) -> Path:
    """The plan for the fused regions of all cases of this size: masks have no part in it."""
    return Path(arguments.work) / f"plan-{'x'.join(map(str, case.size))}.json"


def tune(case: Case, arguments: argparse.Namespace) -> None:
    """Searches the fused regions of the case's size. Runs in a process of its own that has the GPU."""
    folder = Path(arguments.work) / "tuned"
    folder.mkdir(exist_ok=True)
    source = folder / "encoder.onnx"
    onnx.save(build_encoder(case.spec(arguments.seed), make_mask(case.kind, case.seq)), str(source))
    fusion = FusionWishes(True, arguments.tune_budget, plan_of(case, arguments))
    engine = EngineWishes(wanted=False, precision=arguments.precision, timing_cache=arguments.timing_cache)
    options = OptimizeOptions(verify=False, engine=engine, fusion=fusion)
    print_report(pipeline.optimize(source, folder / "encoder.stof.onnx", options, Progress()), Console(width=200))


def refer(case: Case, arguments: argparse.Namespace) -> list[dict[str, np.ndarray]]:
    """The reference outputs. Needs no GPU; runs in a process of its own."""
    if not arguments.check:
        return []
    mask = make_mask(case.kind, case.seq)
    return [reference(case.spec(arguments.seed), mask, arguments.seed)(case.feeds(arguments.seed))]


def build_part(case: Case, part: str, arguments: argparse.Namespace) -> choose.Candidate:
    """Builds the "plain" or the "stof" engine of a prepared case. Runs in a process of its own."""
    folder = case.folder(arguments)
    with turns.building():
        if part == "plain":
            return choose.build_plain(folder / "encoder.onnx", _options(case, arguments))
        return choose.build_stof(folder / "encoder.stof.onnx", _options(case, arguments))


def _options(case: Case, arguments: argparse.Namespace) -> BuildOptions:
    profile = {"x": tuple(DimRange(n, n, n) for n in (case.batch, case.seq, 768))}
    library = find_plugin_library()
    return BuildOptions(
        arguments.precision,
        profile,
        library,
        arguments.embed,
        timing_cache=arguments.timing_cache,
        half_io=arguments.half_io,
    )


@dataclass
class Wave:
    """Cases whose engines are built side by side.

    `builders` have the GPU, `helpers` prepare and compute references. `plain_of` names the case whose plain engine
    serves a size, `plain` holds those engines, of earlier waves too.
    """

    builders: Executor
    helpers: Executor
    arguments: argparse.Namespace
    plain_of: dict[tuple[int, int, int], Case] = field(default_factory=dict)
    plain: dict[Case, Future[choose.Candidate]] = field(default_factory=dict)
    prepared: dict[Case, Future[None]] = field(default_factory=dict)
    expected: dict[Case, Future[list[dict[str, np.ndarray]]]] = field(default_factory=dict)

    def ahead(self, cases: Sequence[Case]) -> None:
        """Has the helpers start on `cases`."""
        for case in cases:
            if case not in self.prepared:
                self.prepared[case] = self.helpers.submit(prepare, case, self.arguments)
                self.expected[case] = self.helpers.submit(refer, case, self.arguments)

    def run(self, cases: Sequence[Case]) -> Iterator[dict[str, object]]:
        """A line for each case, timed when the last engine of the wave is there."""
        begun, arguments = time.monotonic(), self.arguments
        self.ahead(cases)
        owners, stof = {}, {}
        for case in cases:
            wait([self.prepared[case]])
            owners[case] = self.plain_of.setdefault(case.size, case) if arguments.plain_once else case
            if owners[case] not in self.plain:
                self.plain[owners[case]] = self.builders.submit(build_part, owners[case], "plain", arguments)
            stof[case] = self.builders.submit(build_part, case, "stof", arguments)
        wait([*stof.values(), *self.plain.values(), *(self.expected[case] for case in cases)])
        print(f"wave of {len(stof)} cases built in {time.monotonic() - begun:.0f} s", flush=True)
        for case, owner in owners.items():
            begun = time.monotonic()
            try:
                self.prepared[case].result()  # says what went wrong first
                plain, outputs = self.plain[owner].result(), self.expected[case].result()
                lines = _settled(case, owner, plain, stof[case].result(), outputs, arguments)
            except Exception as error:  # the next case may still run
                failed = f"{type(error).__name__}: {error}"
                lines = [{"mask": case.kind, "B": case.batch, "S": case.seq, "failed": failed}]
            for line in lines:
                yield line | {"timing_s": round(time.monotonic() - begun, 1)}


def _settled(
    case: Case,
    owner: Case,
    plain: choose.Candidate,
    stof: choose.Candidate,
    expected: list[dict[str, np.ndarray]],
    arguments: argparse.Namespace,
) -> list[dict[str, object]]:
    """A line for the engine with attentions, and one with `fusion` for that with fused regions, where it was built."""
    if plain.timing is None and owner != case:  # its outputs are those of another mask
        plain = choose.Candidate("plain", problem=plain.problem)
    found = choose.Race(plain, stof)
    portable = case.folder(arguments) / "encoder.stof.onnx"
    choose.settle(found, portable, _options(case, arguments), [case.feeds(arguments.seed)], expected)
    line = engine_line(case.kind, case.spec(arguments.seed), found, arguments) | {"plain_mask": owner.kind}
    if arguments.layers_table:
        for name, candidate in (("layers_us", stof), ("plain_layers_us", plain)):
            longest = sorted(candidate.layers.items(), key=lambda item: -item[1])[:14]
            line[name] = {n[:160]: round(t, 1) for n, t in longest if t > 0}
    if stof.engine is not None:
        stof.engine = BuiltEngine(b"", stof.engine.seconds)
    return [line] if found.fused is None else [line, line | fused_line(found, found.fused, arguments)]


def fused_line(found: choose.Race, fused: choose.Candidate, arguments: argparse.Namespace) -> dict[str, object]:
    """What differs in the line of the engine with fused regions: `stof_ms` is its time, `attention_ms` that without."""
    plain, attention = found.plain.timing, found.stof.timing
    line: dict[str, object] = {
        "fusion": True,
        "stof_ms": fused.timing and round(fused.timing.median, 4),
        "attention_ms": attention and round(attention.median, 4),
        "gain": attention and fused.timing and round(attention.median / fused.timing.median, 3),
        "speedup": plain and fused.timing and round(plain.median / fused.timing.median, 3),
        "cuda_graph": bool(fused.timing and fused.timing.graph),
        "stof_mem_mb": round(fused.memory / 2**20, 1),
        "stof_engine_mb": fused.engine and round(len(fused.engine.data) / 2**20, 1),
        "build_s": [c.engine and round(c.engine.seconds, 1) for c in (found.plain, fused)],
        "err_stof": fused.error and fused.error.relative,
        "regions": [[r.template, r.config, r.reason] for r in fused.lowered.regions] if fused.lowered else [],
        "problems": [fused.problem] if fused.problem else [],
    }
    if arguments.layers_table:
        longest = sorted(fused.layers.items(), key=lambda item: -item[1])[:20]
        line["layers_us"] = {n[:160]: round(t, 1) for n, t in longest if t > 0}
    return line


def reference(spec: EncoderSpec, mask: np.ndarray, seed: int) -> choose.Reference:
    """ONNX Runtime on the first batch entry (the others do not influence it); sampled rows of it where it is large."""
    if spec.heads * len(mask) ** 2 > _MOST_SCORES:
        rows = np.sort(np.random.default_rng(seed + 2).choice(len(mask), _SAMPLED, replace=False))
        return lambda feeds: {"y": sampled_output(replace(spec, batch=1), mask, feeds["x"][:1], rows)}

    def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        single = Runner(build_encoder(replace(spec, batch=1), mask), Path())
        return single.run({"x": feeds["x"][:1]})

    return run


def engine_line(kind: str, spec: EncoderSpec, found: choose.Race, arguments: argparse.Namespace) -> dict[str, object]:
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
        "embedded": arguments.embed,
        "half_io": arguments.half_io,
        "plain_ms": plain.timing and round(plain.timing.median, 4),
        "stof_ms": stof.timing and round(stof.timing.median, 4),
        "speedup": speedup and round(speedup, 3),
        "cuda_graph": bool(plain.timing and stof.timing and plain.timing.graph and stof.timing.graph),
        "kept": found.winner().kind,
        "plain_mem_mb": round(plain.memory / 2**20, 1),
        "stof_mem_mb": round(stof.memory / 2**20, 1),
        "load_s": [round(c.load_seconds, 3) for c in found.candidates],
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
    parser.add_argument("--layers-table", action="store_true", help="per-layer times of the stof engine")
    parser.add_argument(
        "--plain-once",
        action="store_true",
        help="build the plain engine of each size with its first mask only (`plain_mask`): it adds whatever mask alike",
    )
    parser.add_argument("--half-io", action="store_true", help="float16 inputs and outputs, as torch.compile's here")
    parser.add_argument(
        "--tune-budget", type=float, metavar="SECONDS", help="a size: fused regions, a second line a case"
    )
    parser.add_argument("--embed", action=argparse.BooleanOptionalAction, default=True, help="the plugin library")
    parser.add_argument("--jobs", type=int, default=1, help="engines built side by side; 1 gives the best tactics")
    parser.add_argument("--wave", type=int, default=1, help="cases whose engines are built before any is timed")
    parser.add_argument("--timing-cache", type=Path, help="shared by all builds (one job only)")
    parser.add_argument("--budget", type=float, default=1e9, help="start no further wave after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/end_to_end.jsonl"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.timing_cache is not None and arguments.jobs > 1:
        parser.error("--timing-cache is for one job: each process keeps its own")
    start = time.monotonic()
    cases = [Case.parse(text, arguments.layers) for text in arguments.case or CASES]
    context = multiprocessing.get_context("spawn")  # a forked process can not use CUDA
    with (
        tempfile.TemporaryDirectory() as arguments.work,
        ProcessPoolExecutor(arguments.jobs, context) as builders,
        ProcessPoolExecutor(_HELPERS, context) as helpers,
    ):
        for case in {case.size: case for case in reversed(cases)}.values() if arguments.tune_budget else ():
            builders.submit(tune, case, arguments).result()
        wave = Wave(builders, helpers, arguments)
        wave.ahead(cases)
        for first in range(0, len(cases), arguments.wave):
            some = cases[first : first + arguments.wave]
            if time.monotonic() - start > arguments.budget:
                print(f"out of time before {some[0]}", flush=True)
                break
            for line in wave.run(some):
                print(json.dumps(line), flush=True)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
