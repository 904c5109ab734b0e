"""The command itself on exports of real architectures, end to end on TensorRT.

    python -m benchmarks.real_models export bert-window:16x2048 ... -o FOLDER    # needs torch; graphs without weights
    python -m benchmarks.real_models run FOLDER/bert-window-16x2048x2.onnx ...   # needs TensorRT and a GPU

`export` writes TorchScript exports (opset 17) of transformers' models with hidden size 768 and 12 heads, and each a
second time with a batch of one. `run` draws the weights from their seeds, computes the first batch entry on ONNX
Runtime in float32, calls `stof-onnx optimize --engine`, and lets a fresh process that knows nothing of stof-onnx load
the engine (examples/run_engine.py). A line a model goes to `--out`, as benchmarks.end_to_end describes it; beside that
`err_loaded` (the fresh process's), `verified` (the portable file was compared with the original in the same run) and
`seconds`. With `--initial-plan` the command gets the plan of the search's initial scheme, every usual subgraph a
region, or else MODEL.plan.json where that lies beside the model; a second line is that of the engine with attentions
and regions.

With `--slots` several processes build side by side; a timing stops the others (benchmarks.pausing).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from stof_onnx.graph.fold_small import fold_small
from stof_onnx.graph.proto_graph import drop_dead
from stof_onnx.graph.proto_shapes import infer_shapes

from benchmarks.pausing import Pausing

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
# Name: architecture and mask options of `stof-onnx export`.
MODELS: dict[str, list[str]] = {
    "bert-bigbird": ["bert", "--mask", "bigbird"],
    "bert-window": ["bert", "--mask", "window", "--width", "64"],
    "bert-longformer": ["bert", "--mask", "longformer"],
    "gpt2-causal": ["gpt2"],
    "llama-causal": ["llama", "--kv-heads", "4"],
    "mistral-window": ["mistral", "--kv-heads", "4"],
    "t5-encoder": ["t5-encoder"],
    "vit": ["vit"],
}
HIDDEN, HEADS, VOCABULARY = 768, 12, 1024
_MOST_FOLDED = 1 << 29  # elements of a mask
_MOST_SCORES = 1 << 26  # of all heads and entries: beyond, the portable file is not compared in the same run


def export(case: str, folder: Path) -> None:
    """Writes the model of `case` (NAME:BxS[xLAYERS]) and its twin of one batch entry, both without weights."""
    from stof_models import cli
    from stof_models.seeded import strip

    name, batch, seq, layers = parse(case)
    sizes = ["--hidden", HIDDEN, "--heads", HEADS, "--layers", layers, "--vocab", VOCABULARY]
    for path, count in ((folder / f"{name}-{batch}x{seq}x{layers}.onnx", batch), (None, 1)):
        path = path or twin(folder / f"{name}-{batch}x{seq}x{layers}.onnx")
        if name == "vit":  # no text model: traced whole, then stripped; `seq` becomes the next smaller square
            whole = path.with_name("whole.onnx")
            options = [*MODELS[name], *sizes, "--seq", int(seq**0.5) ** 2, "--batch", count, "-o", whole]
            assert cli.main(list(map(str, options))) == 0
            strip(whole, path)
            whole.with_suffix(".json").rename(path.with_suffix(".json"))
            whole.unlink()
            continue
        options = [*MODELS[name], *sizes, "--seq", seq, "--batch", count, "--graph-only", "-o", path]
        assert cli.main(list(map(str, options))) == 0
        if MODELS[name] != ["t5-encoder"]:  # its table of buckets would be written out, S x S
            fold_masks(path)


def fold_masks(path: Path) -> None:
    """Evaluates the masks that the export computes from sizes alone, as it does itself where it traces with fixed ones.

    Graphs without weights are traced with dynamic axes. What is left of that are masks to compute at every inference,
    and operators that TensorRT 8.6 does not parse. A mask that is the same for all batch entries is kept once.
    """
    model = onnx.load(str(path), load_external_data=False)
    while fold_small(model, infer_shapes(model).dims, most=_MOST_FOLDED):
        pass
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.BOOL and len(tensor.dims) == 4 and tensor.dims[0] > 1:
            values = onnx.numpy_helper.to_array(tensor)
            if (values == values[:1]).all():
                tensor.CopyFrom(onnx.numpy_helper.from_array(values[:1], tensor.name))
    drop_dead(model.graph)
    del model.graph.value_info[:]
    onnx.save(model, str(path))


def parse(case: str) -> tuple[str, int, int, int]:
    """Name, batch, sequence, layers (2 where none are given)."""
    name, _, sizes = case.partition(":")
    batch, seq, layers = (*map(int, sizes.split("x")), 2)[:3]
    return name, batch, seq, layers


def twin(path: Path) -> Path:
    """The model of one batch entry."""
    return path.with_name(f"{path.stem}.one.onnx")


@dataclass(frozen=True)
class Prepared:
    """What a model is run on and checked against: outputs of the first batch entry, and the seconds they took."""

    feeds: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    seconds: float


def plan_of(path: Path) -> Path:
    """The plan for a model."""
    return path.with_suffix(".plan.json")


def prepare(path: Path, seed: int, plan: bool = False) -> Prepared:
    """Draws weights and inputs, computes the reference and the initial scheme's plan. Needs no GPU: another process may
    do it ahead."""
    from stof_models.info import ExportInfo, info_path
    from stof_models.seeded import fill
    from stof_onnx.graph.read import read_proto
    from stof_onnx.verify.session import Runner

    begun = time.monotonic()
    for model in (path, twin(path)):
        fill(model)
    feeds = ExportInfo.load(info_path(path)).random_inputs(np.random.default_rng(seed), padded=False)
    expected = Runner(read_proto(twin(path)), path.parent).run({n: a[:1] for n, a in feeds.items()})
    if plan and not plan_of(path).exists():
        from benchmarks.fusion_bench.initial_plan import write_initial_plan

        write_initial_plan(path, plan_of(path))
    return Prepared(feeds, expected, round(time.monotonic() - begun, 1))


@dataclass(frozen=True)
class Built:
    """The command's engine and report, in a folder that `finish` deletes."""

    path: Path
    work: Path
    prepared: Prepared
    verified: bool
    seconds: float


def build(path: Path, prepared: Prepared, arguments: argparse.Namespace) -> Built:
    """Runs the command."""
    from polygraphy.json import save_json
    from stof_models.info import ExportInfo, info_path

    site = ExportInfo.load(info_path(path)).sites[0]
    batch = next(iter(prepared.feeds.values())).shape[0]
    verified = batch * site.heads * int(site.seq_q) * int(site.seq_kv) <= _MOST_SCORES
    work = Path(tempfile.mkdtemp(dir=path.parent))
    inputs, outputs = work / "inputs.json", work / "outputs.json"
    save_json([prepared.feeds], str(inputs))
    save_json([prepared.expected], str(outputs))
    command = ["optimize", path, "-o", work / "model.stof.onnx", "--engine", work / "model.stof.engine"]
    command += ["--report", work / "report.json", "--load-inputs", inputs, "--load-outputs", outputs]
    command += ["--no-verify"] * (not verified) + ["--half-io"] * arguments.half_io
    if arguments.timing_cache is not None:
        command += ["--timing-cache", arguments.timing_cache.resolve()]
    if arguments.tune_budget:
        command += ["--tune-budget", arguments.tune_budget]
    if arguments.initial_plan:
        command += ["--plan", plan_of(path)]
    begun = time.monotonic()
    if arguments.in_process:
        _here(command)
    else:
        _process([sys.executable, "-c", _COMMAND, *command], work)
    return Built(path, work, prepared, verified, round(time.monotonic() - begun, 1))


def lines_of(built: Built, arguments: argparse.Namespace, err_loaded: float | None = None) -> list[dict[str, Any]]:
    """A line for the engine with attentions, one for that with fused regions too."""
    from stof_models.info import ExportInfo, info_path

    report = json.loads((built.work / "report.json").read_text(encoding="utf-8"))
    batch = next(iter(built.prepared.feeds.values())).shape[0]
    lines = [_line(built.path, ExportInfo.load(info_path(built.path)), report, batch, arguments)]
    if "fused" in report["engine"]:
        lines.append(lines[0] | _fused(report))
    seconds = {"reference": built.prepared.seconds, "command": built.seconds}
    return [line | {"err_loaded": err_loaded, "verified": built.verified, "seconds": seconds} for line in lines]


def finish(built: Built, arguments: argparse.Namespace, pausing: Pausing | None = None) -> list[dict[str, Any]]:
    """Has a fresh process run the engine, and checks what that computed. Deletes the folder."""
    from stof_onnx.trt.compare import measure

    work, prepared = built.work, built.prepared
    try:
        for each, array in prepared.feeds.items():
            np.save(work / f"{each}.npy", array)
        alone = [sys.executable, "-I", "-c", _ALONE.format(path=[p for p in sys.path if _is_foreign(p)])]
        given = [f"{each}={work / each}.npy" for each in prepared.feeds]
        command = [*alone, ROOT / "examples" / "run_engine.py", work / "model.stof.engine", *given]
        _process(command, work, pausing=pausing)
        loaded = {each: np.load(work / f"{each}.npy") for each in prepared.expected}
        return lines_of(built, arguments, measure(loaded, prepared.expected).relative)
    finally:
        shutil.rmtree(work)


def mask_name(site: Any) -> str:
    """Of a described attention; an architecture's local layers by their band."""
    return "none" if site.mask is None else str(site.mask.band or site.mask.kind)


def _fused(report: dict[str, Any]) -> dict[str, Any]:
    """What differs in the line of the engine with fused regions: `stof_ms` is its time, `attention_ms` that without."""
    fused, fusion = report["engine"]["fused"], report["fusion"] or {}  # rotations are fused without a search
    plan = fusion.get("plan") or {"blocks": []}
    plain, attention = report["engine"]["plain"]["ms"], report["engine"]["stof"]["ms"]
    timed = {name: plan.get(name) for name in ("timer", "samples", "builds", "seconds", "build_seconds", "cached")}
    regions = {
        f"{r['template']} {r['config']} of {'+'.join(r['operators'])}": [r["fused_us"], r["left_us"], r["kept"]]
        for block in plan["blocks"]
        for r in block["regions"]
    }
    return {
        "fusion": True,
        "stof_ms": fused["ms"],
        "attention_ms": attention,
        "gain": fused["ms"] and attention and round(attention / fused["ms"], 3),
        "speedup": fused["ms"] and plain and round(plain / fused["ms"], 3),
        "cuda_graph": fused["cuda_graph"],
        "stof_mem_mb": fused["memory_mb"],
        "err_stof": fused["error"] and fused["error"]["relative"],
        "build_s": [report["engine"]["plain"]["build_s"], fused["build_s"]],
        "problems": [fused["problem"]] if fused["problem"] else [],
        "regions": len(fusion.get("regions") or report["engine"].get("regions") or []),
        "tuning": timed,
        "region_us": regions,
    }


def _here(command: list[Any]) -> None:
    from stof_onnx import cli

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(message)s")
    code = cli.main(list(map(str, command)))
    if code:
        raise RuntimeError(f"exit code {code}")


# `stof-onnx`, with its log.
_COMMAND = """
import logging, sys
from stof_onnx.cli import main
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(message)s")
sys.exit(main())
"""
# A process that finds TensorRT and numpy, but nothing of this project.
_ALONE = """
import runpy, sys
sys.path[:0] = {path}
try:
    import stof_onnx
    sys.exit("stof_onnx is there")
except ImportError:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _is_foreign(folder: str) -> bool:
    return bool(folder) and not Path(folder).resolve().is_relative_to(ROOT)


def _process(command: list[Any], cwd: Path, pausing: Pausing | None = None) -> None:
    """Runs it; what it says appears as it is said."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "160"}
    quiet = {"stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    start = pausing.started if pausing is not None else subprocess.Popen
    with start(list(map(str, command)), cwd=cwd, env=environment, **quiet) as child:
        said = child.communicate()[1]
    if child.returncode:
        raise RuntimeError(f"exit code {child.returncode}: {said[-1500:]}")


def _line(path: Path, info: Any, report: dict[str, Any], batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    from stof_onnx.trt import availability, cuda
    from stof_onnx.trt.build import tactic_sources

    engine, site = report["engine"], info.sites[0]
    plain, stof = engine["plain"], engine["stof"]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": arguments.commit,
        "gpu": cuda.name(),
        "trt": availability.tensorrt().__version__,
        "tactic_sources": tactic_sources(),
        "model": path.stem.rpartition("-")[0],
        "mask": mask_name(site),
        "B": batch,
        "S": int(site.seq_q),
        "layers": len(info.sites),
        "precision": "fp16",
        "fusion": False,
        "half_io": arguments.half_io,
        "plain_ms": plain["ms"],
        "stof_ms": stof["ms"],
        "speedup": plain["ms"] and stof["ms"] and round(plain["ms"] / stof["ms"], 3),
        "cuda_graph": bool(plain["cuda_graph"] and stof["cuda_graph"]),
        "kept": engine["kept"],
        "plain_mem_mb": plain["memory_mb"],
        "stof_mem_mb": stof["memory_mb"],
        "load_s": [plain["load_s"], stof["load_s"]],
        "plain_engine_mb": plain["engine_bytes"] and round(plain["engine_bytes"] / 2**20, 1),
        "stof_engine_mb": stof["engine_bytes"] and round(stof["engine_bytes"] / 2**20, 1),
        "build_s": [plain["build_s"], stof["build_s"]],
        "err_plain": plain["error"] and plain["error"]["relative"],
        "err_stof": stof["error"] and stof["error"]["relative"],
        "mask_bytes": sum(each["mask_bytes"] for each in engine["sites"][:1]),
        "dense_mask_bytes": sum(each["dense_mask_bytes"] for each in engine["sites"][:1]),
        "kernel": engine["sites"][0]["kernel"] if engine["sites"] else "",
        "problems": [c["problem"] for c in (plain, stof) if c["problem"]],
    }


def main() -> int:
    """Exit code 1 when a model failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export")
    command.add_argument("cases", nargs="+", metavar="MODEL:BxS[xLAYERS]", help=f"models: {', '.join(MODELS)}")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    command = commands.add_parser("run")
    command.add_argument("models", nargs="+", type=Path)
    command.add_argument("--seed", type=int, default=11)
    command.add_argument("--timing-cache", type=Path, help="of the command; models of one size share most tactics")
    command.add_argument("--half-io", action="store_true", help="of the command: float16 outputs")
    command.add_argument("--tune-budget", metavar="TIME", help="of the command: fused regions as well, a second line")
    command.add_argument("--initial-plan", action="store_true", help="of the command: regions of the initial scheme")
    command.add_argument("--slots", type=int, default=1, help="models that are built side by side")
    command.add_argument("--references", type=int, default=2, help="computed side by side; 1 where S needs the memory")
    command.add_argument("--pause", type=Path, metavar="FOLDER", help="shared with another run's processes")
    command.add_argument(
        "--in-process",
        action="store_true",
        help="one process for all commands of a slot: TensorRT builds later models in a fraction of the time",
    )
    command.add_argument("--timeout", type=float, metavar="SECONDS", help="of the command")
    command.add_argument("--commit", default=os.environ.get("STOF_COMMIT", ""))
    command.add_argument("--out", type=Path, default=Path("benchmarks/results/end_to_end.jsonl"))
    arguments = parser.parse_args()
    if arguments.command == "export":
        for case in arguments.cases:
            export(case, arguments.output)
        return 0
    return _run_all(arguments)


def _step_back() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(os, "nice"):
        os.nice(10)  # builds go first


class Slot:
    """A process that does one thing at a time; a new one when it has died or taken too long."""

    def __init__(self, pausing: Pausing | None = None) -> None:
        self.pausing = pausing
        self.process = _process_of(pausing)

    def call(self, timeout: float | None, function: Callable[..., T], *given: Any) -> T:
        """`function` in that process.

        Raises:
            RuntimeError: the time was up, or the process has died.
        """
        pid = self.process.submit(os.getpid).result()
        try:
            return self.process.submit(function, *given).result(timeout)
        except (FutureTimeout, BrokenExecutor) as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if self.pausing is not None:
                self.pausing.go_on()  # it may have been the one that timed
            self.process = _process_of(self.pausing)
            raise RuntimeError(f"not done after {timeout} s" if isinstance(error, FutureTimeout) else "died") from error


def _process_of(pausing: Pausing | None) -> Executor:
    context = multiprocessing.get_context("spawn")  # a forked process can not use CUDA
    return ProcessPoolExecutor(1, context, *((pausing.install,) if pausing else ()))


@dataclass
class Sitting:
    """A run: `ahead` are references that other processes compute, `checks` the fresh processes."""

    arguments: argparse.Namespace
    ahead: Iterator[tuple[Path, Future[Prepared]]]
    checks: Executor
    pausing: Pausing | None
    failed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self) -> None:
        """Takes models in turn, one slot's share."""
        slot = Slot(self.pausing)
        try:
            while model := self._next():
                self._run(slot, *model)
        finally:
            slot.process.shutdown()

    def _next(self) -> tuple[Path, Future[Prepared]] | None:
        with self.lock:
            return next(self.ahead, None)

    def _run(self, slot: Slot, path: Path, prepared: Future[Prepared]) -> None:
        """One model; a failure is a line, the next model may still run."""
        try:
            built = slot.call(self.arguments.timeout, build, path, prepared.result(), self.arguments)
            self._write(lines_of(built, self.arguments))  # again when the engine has run alone: the newest line counts
            self.checks.submit(self._check, built)
        except Exception as error:
            self._fail(path, error)

    def _check(self, built: Built) -> None:
        try:
            self._write(finish(built, self.arguments, self.pausing))
        except Exception as error:
            self._fail(built.path, error)

    def _fail(self, path: Path, error: Exception) -> None:
        self.failed = True
        self._write([{"model": path.stem, "failed": f"{type(error).__name__}: {error}"}])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        with self.lock:
            for line in lines:
                print(json.dumps(line), flush=True)
                with self.arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def _run_all(arguments: argparse.Namespace) -> int:
    arguments.in_process |= arguments.slots > 1  # else a timing could not stop the command
    with contextlib.ExitStack() as stack:
        helpers = stack.enter_context(
            ProcessPoolExecutor(arguments.references, multiprocessing.get_context("spawn"), initializer=_step_back)
        )
        pausing = None
        if arguments.slots > 1:
            pausing = Pausing(arguments.pause or Path(stack.enter_context(tempfile.TemporaryDirectory())))
        ahead = [
            (path, helpers.submit(prepare, path, arguments.seed, arguments.initial_plan)) for path in arguments.models
        ]
        checks = stack.enter_context(ThreadPoolExecutor(1))
        sitting = Sitting(arguments, iter(ahead), checks, pausing)
        with ThreadPoolExecutor(arguments.slots) as slots:
            for done in [slots.submit(sitting.work) for _ in range(arguments.slots)]:
                done.result()
    return int(sitting.failed)


if __name__ == "__main__":
    sys.exit(main())
