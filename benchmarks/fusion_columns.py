"""Three columns in one sitting: TensorRT alone, with attentions replaced, and with fused regions too.

    python -m benchmarks.fusion_columns window:16x2048 FOLDER/bert-bigbird-16x2048x2.onnx ... [--jobs 3]

A subject is an encoder (MASK:BxS, as in benchmarks.end_to_end; fp16 ends, as torch.compile's has) or a model that
`benchmarks.real_models export` wrote. Its plan is the search's initial scheme, every usual subgraph as a region, so
that no time of the GPU goes into it. Engines are built side by side in the order of the subjects. When a subject has
its three, the builds are stopped (benchmarks.pausing), and the three are timed with the GPU to themselves and compared
with ONNX Runtime in float32 on the first batch entry. Two lines a subject go to `--out`, without fusion and with, as
benchmarks.end_to_end describes them, `layers_us` always among it; beside that `burst_ms`, the first 20 ms after a
pause, when the power limit has not lowered the clocks yet, and `stream_ms`, without CUDA graph.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from stof_models.info import ExportInfo, info_path
from stof_models.seeded import fill
from stof_onnx import pipeline
from stof_onnx.graph.read import read_proto
from stof_onnx.options import DimRange, EngineWishes, FusionWishes, OptimizeOptions
from stof_onnx.progress import Progress
from stof_onnx.trt import choose, turns
from stof_onnx.trt.availability import load_plugins
from stof_onnx.trt.build import BuildOptions, BuiltEngine
from stof_onnx.trt.engine_step import find_plugin_library
from stof_onnx.trt.session import EngineSession
from stof_onnx.verify.session import Runner

from benchmarks.encoder import EncoderSpec, build_encoder, make_mask
from benchmarks.end_to_end import Case, engine_line, fused_line, reference
from benchmarks.fusion_bench.initial_plan import write_initial_plan
from benchmarks.pausing import Pausing
from benchmarks.real_models import mask_name, twin

PARTS = ("fused", "stof", "plain")  # in the order of building: the fastest first
_LAYERS, _HELPERS = 2, 5
_SHOWN = ("model", "mask", "B", "S", "fusion", "plain_ms", "attention_ms", "stof_ms", "gain", "kept")
_PAUSE_S, _BURST_S = 0.5, 0.02
_LAST_S = 12.0  # of the budget, for the last timing


@dataclass(frozen=True)
class Subject:
    """One model, by the text that names it, in the folder `work`."""

    text: str
    work: str
    seed: int

    @property
    def exported(self) -> bool:
        return self.text.endswith(".onnx")

    @cached_property
    def case(self) -> Case:
        """Of an encoder."""
        return Case.parse(self.text, _LAYERS)

    @property
    def name(self) -> str:
        return Path(self.text).stem if self.exported else f"encoder-{self.text.replace(':', '-')}"

    @property
    def source(self) -> Path:
        return Path(self.text) if self.exported else Path(self.work) / f"{self.name}.onnx"

    @property
    def portable(self) -> Path:
        return Path(self.work) / f"{self.name}.stof.onnx"

    @property
    def plan(self) -> Path:
        return Path(self.work) / f"{self.name}.plan.json"

    def write(self) -> None:
        """The model's file, with its weights."""
        if self.exported:
            fill(self.source)
            fill(twin(self.source))
        else:
            onnx.save(build_encoder(self.case.spec(self.seed), make_mask(self.case.kind, self.case.seq)), self.source)

    def feeds(self) -> dict[str, np.ndarray]:
        if not self.exported:
            return self.case.feeds(self.seed)
        return ExportInfo.load(info_path(self.source)).random_inputs(np.random.default_rng(self.seed), padded=False)

    def expected(self) -> dict[str, np.ndarray]:
        """Outputs for the first batch entry."""
        feeds = self.feeds()
        if not self.exported:
            return reference(self.case.spec(self.seed), make_mask(self.case.kind, self.case.seq), self.seed)(feeds)
        small = twin(self.source)
        return Runner(read_proto(small), small.parent).run({name: a[:1] for name, a in feeds.items()})

    def facts(self) -> tuple[str, str, EncoderSpec]:
        """Model, mask, and sizes, for the line."""
        if not self.exported:
            return "encoder-768", self.case.kind, self.case.spec(self.seed)
        info = ExportInfo.load(info_path(self.source))
        site, batch = info.sites[0], next(iter(self.feeds().values())).shape[0]
        spec = EncoderSpec(len(info.sites), 768, 12, batch, int(site.seq_q))
        return self.name.rpartition("-")[0], mask_name(site), spec


def prepare(subject: Subject) -> str:
    """Writes the model, its plan and its optimized file. Sees no GPU; says what came of it."""
    subject.write()
    write_initial_plan(subject.source, subject.plan)
    wishes = OptimizeOptions(verify=False, engine=EngineWishes(wanted=False), fusion=FusionWishes(plan=subject.plan))
    report = pipeline.optimize(subject.source, subject.portable, wishes, Progress())
    assert report.fusion is not None
    return f"{report.replaced} attentions, {len(report.fusion.applied)} regions {report.fusion.reason}"


def refer(subject: Subject, prepared: str) -> list[dict[str, np.ndarray]]:
    """The reference outputs of a prepared subject. Sees no GPU."""
    return [subject.expected()]


def build_part(subject: Subject, part: str) -> choose.Candidate:
    """One of the three engines. Runs in a process that has the GPU."""
    options = options_of(subject)
    with turns.building():
        if part == "plain":
            return choose.build_plain(subject.source, options)
        return choose.build_stof(subject.portable, options, regions=part == "fused")


def options_of(subject: Subject) -> BuildOptions:
    """For engines at the model's own sizes; the plugin library stays outside."""
    graph = onnx.load(str(subject.source), load_external_data=False).graph
    given = {t.name for t in graph.initializer}
    sizes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input if i.name not in given}
    profile = {name: tuple(DimRange(n, n, n) for n in shape) for name, shape in sizes.items()}
    return BuildOptions("fp16", profile, find_plugin_library(), embed=False, half_io=not subject.exported)


@dataclass
class Sitting:
    """The engines of all subjects. `deadline`: of time.monotonic()."""

    builders: Executor
    helpers: Executor
    deadline: float
    prepared: dict[Subject, Future[str]] = field(default_factory=dict)
    expected: dict[Subject, Future[list[dict[str, np.ndarray]]]] = field(default_factory=dict)
    engines: dict[tuple[Subject, str], Future[choose.Candidate]] = field(default_factory=dict)

    def ahead(self, subjects: Sequence[Subject]) -> None:
        """Has all models written and optimized."""
        for subject in subjects:
            self.prepared[subject] = self.helpers.submit(prepare, subject)

    def order(self, subjects: Sequence[Subject], plain: Sequence[Subject]) -> None:
        """Has the engines of `subjects` built, of those in `plain` the plain one too."""
        ready = [subject for subject in subjects if self.worked(subject, self.prepared[subject])]
        for subject in ready:
            self.expected[subject] = self.helpers.submit(refer, subject, self.prepared[subject].result())
        for subject, part in ((s, p) for p in PARTS for s in ready if p != "plain" or s in plain):
            self.engines[subject, part] = self.builders.submit(build_part, subject, part)

    def lines(self, subjects: Sequence[Subject]) -> Iterator[dict[str, Any]]:
        """Their lines, when their engines are built or the time is up."""
        mine = [future for (subject, _), future in self.engines.items() if subject in subjects]
        wait(mine, max(0.0, self.deadline - _LAST_S - time.monotonic()))
        running = [future for future in mine if not future.cancel() and not future.done()]
        if running:
            wait([self.expected[subject] for subject in subjects if subject in self.expected])
            for process in multiprocessing.active_children():  # nothing more will be asked of them
                process.kill()
        for subject in subjects:
            ordered = {p: self.engines[subject, p] for p in PARTS if (subject, p) in self.engines}
            built = {p: f for p, f in ordered.items() if f.done() and not f.cancelled()}
            done = {p: f.result() for p, f in built.items() if self.worked(subject, f)}
            if "fused" in done or "stof" in done:
                try:
                    yield from settled(subject, done, self.expected[subject].result())
                except Exception as error:  # the next subject may still be timed
                    print(f"{subject.name} FAILED: {type(error).__name__}: {error}", flush=True)

    @staticmethod
    def worked(subject: Subject, future: Future[Any]) -> bool:
        if error := future.exception():
            print(f"{subject.name} FAILED: {type(error).__name__}: {error}", flush=True)
        return error is None


def settled(
    subject: Subject, built: dict[str, choose.Candidate], expected: list[dict[str, np.ndarray]]
) -> Iterator[dict[str, Any]]:
    """Times what was built; the line without fusion, where there is that engine, and the one with."""
    model, mask, spec = subject.facts()
    lowered = next(c.lowered for c in built.values() if c.lowered is not None)
    plain, stof, fused = (
        built.get(kind, choose.Candidate(kind, problem="not built: out of time", lowered=lowered))
        for kind in ("plain", "stof", "fused")
    )
    found = choose.Race(plain, stof, fused=fused)
    options, feeds = options_of(subject), subject.feeds()
    assert options.plugins is not None
    load_plugins(options.plugins)  # the engines were built in other processes
    choose.settle(found, subject.portable, options, [feeds], expected)
    with turns.alone():
        timed = [c for c in (found.stof, found.fused) if c is not None and c.timing is not None]
        shortly = {c.kind: _shortly(c, feeds) for c in timed}
    about = argparse.Namespace(precision="fp16", embed=False, half_io=not subject.exported, layers_table=True)
    line = engine_line(mask, spec, found, about) | {"model": model}
    layers = {name: _longest(candidate) for name, candidate in (("layers_us", found.stof), ("plain_layers_us", plain))}
    if stof.timing is not None:
        yield line | layers | shortly["stof"]
    if found.fused is not None and found.fused.timing is not None:
        yield line | fused_line(found, found.fused, about) | shortly["fused"]
    else:
        print(f"{subject.name}: no fused engine: {found.fused and found.fused.problem}", flush=True)
    for candidate in found.candidates:
        if candidate.engine is not None:
            candidate.engine = BuiltEngine(b"", candidate.engine.seconds)


def _shortly(candidate: choose.Candidate, feeds: dict[str, np.ndarray]) -> dict[str, float]:
    """Milliseconds in the first moments after a pause, and without a CUDA graph."""
    assert candidate.engine is not None
    session = EngineSession(candidate.engine.data)
    try:
        time.sleep(_PAUSE_S)
        burst = session.time(feeds, seconds=_BURST_S).median
        return {"burst_ms": round(burst, 4), "stream_ms": round(session.time(feeds, 0.2, use_graph=False).median, 4)}
    finally:
        session.close()


def _longest(candidate: choose.Candidate) -> dict[str, float]:
    return {name[:160]: round(us, 1) for name, us in candidate.longest_layers(30) if us > 0}


def hidden() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def builder(pausing: Pausing) -> None:
    pausing.install()
    _logged()


def _logged() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(message)s")


def main() -> None:
    """Runs the subjects; every line is written at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="+", metavar="MASK:BxS|MODEL.onnx")
    parser.add_argument("--jobs", type=int, default=3, help="engines built side by side")
    parser.add_argument("--plain", nargs="*", metavar="NAME", help="plain engines of these subjects only")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="no engine is waited for longer")
    parser.add_argument("--pause", type=Path, metavar="FOLDER", help="shared with another run's processes")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/end_to_end.jsonl"))
    arguments = parser.parse_args()
    _logged()
    begun, context = time.monotonic(), multiprocessing.get_context("spawn")  # a forked process can not use CUDA
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        pausing = Pausing(arguments.pause or Path(work) / "processes")
        pausing.install()
        builders = stack.enter_context(ProcessPoolExecutor(arguments.jobs, context, builder, (pausing,)))
        helpers = stack.enter_context(ProcessPoolExecutor(_HELPERS, context, hidden))
        subjects = [Subject(text, work, arguments.seed) for text in arguments.subjects]
        sitting = Sitting(builders, helpers, begun + arguments.budget)
        sitting.ahead(subjects)
        for subject in subjects:
            wanted = arguments.plain is None or subject.name in arguments.plain
            sitting.order([subject], [subject] if wanted else [])
        for subject in subjects:
            for line in sitting.lines([subject]):
                shown = ", ".join(f"{name} {line.get(name)}" for name in _SHOWN)
                print(f"[{time.monotonic() - begun:6.1f} s] {shown}", flush=True)
                _append(arguments.out, line)
        print(f"[{time.monotonic() - begun:6.1f} s] done", flush=True)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
