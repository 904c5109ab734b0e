"""Row programs on this GPU: every configuration against the memory floor, PyTorch's kernels and torch.compile.

    PYTHONPATH=optimizer:. python benchmarks/row_programs.py [--seconds 20] [--cases TEXT] [--no-compile] [--out FILE]

Microseconds a call by CUDA-graph replay with cold L2 (input sets rotate), median. The floor is a device-to-device copy
that moves as many bytes, measured here. One JSON line a case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from stof_onnx.kernels.cubin_run import LoadedProgram
from stof_onnx.kernels.triton_rows import (
    RowProgram,
    activation_program,
    compile_programs,
    configurations,
    cost,
    norm_program,
)

from benchmarks.attention_bench.record import ROOT, append, environment
from benchmarks.attention_bench.timing import CALLS, cold_sets, graph_us

RESULTS = ROOT / "benchmarks" / "results" / "row_programs.jsonl"
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A program, and the same in PyTorch on the program's inputs."""

    name: str
    rows: int
    cols: int
    program: RowProgram
    torch: Callable[..., object]


def cases() -> list[Case]:
    """What BERT, GPT-2 and LLaMA need between their GEMMs, at the sizes of their layers."""
    found = []
    for rows, cols in ((1024, 768), (32768, 768), (32768, 2048), (4096, 4096)):

        def layer_norm(x: Any, g: Any, b: Any, n: int = cols) -> Any:
            return F.layer_norm(x, (n,), g, b)

        def add_layer_norm(x: Any, r: Any, g: Any, b: Any, n: int = cols) -> Any:
            s = x + r
            return s, F.layer_norm(s, (n,), g, b)

        def add_rms_norm(x: Any, r: Any, g: Any, n: int = cols) -> Any:
            s = x + r
            return s, F.rms_norm(s, (n,), g, 1e-5)

        def bias_gelu(x: Any, b: Any) -> Any:
            return F.gelu(x + b)

        programs = (
            ("layer_norm", norm_program("layer_norm", cols, "fp16", add=False), layer_norm),
            ("add_layer_norm_sum", norm_program("layer_norm", cols, "fp16", add=True, keep_sum=True), add_layer_norm),
            ("add_rms_norm_sum", norm_program("rms_norm", cols, "fp16", add=True, keep_sum=True), add_rms_norm),
            ("bias_gelu", activation_program("gelu_erf", cols, "fp16", bias=True), bias_gelu),
        )
        found += [Case(name, rows, cols, program, peer) for name, program, peer in programs]
    return found


def median_us(calls: list[Call]) -> float:
    """Of one call; a graph holds the round of calls several times, so that its own launch does not count."""
    return round(graph_us(calls * -(-CALLS // len(calls)), reps=7, budget_ms=30), 2)


def calls_of(case: Case, loaded: LoadedProgram, sets: list[Any]) -> list[Call]:
    shapes = [tuple(t.shape) for t in sets[0][0]]

    def make(inputs: list[Any], outputs: list[Any]) -> Call:
        pointers = [t.data_ptr() for t in inputs], [t.data_ptr() for t in outputs]
        return lambda: loaded.launch(*pointers, shapes, stream=torch.cuda.current_stream().cuda_stream)

    return [make(inputs, outputs) for inputs, outputs in sets]


def measure(case: Case, cubins: list[Any], compiled: bool) -> dict[str, Any]:
    """Microseconds of every configuration and of the peers, and each configuration's largest error against PyTorch."""
    moved = cost(case.program, case.rows).bytes
    sets = [tensors(case) for _ in range(cold_sets(moved))]
    times: dict[str, float] = {}
    exact = case.torch(*[t.float() for t in sets[0][0]])
    exact = exact if isinstance(exact, tuple) else (exact,)
    error = 0.0
    for config, cubin in zip(configurations(case.program), cubins, strict=True):
        loaded = LoadedProgram(cubin)
        for t in sets[0][1]:
            t.fill_(float("nan"))
        calls = calls_of(case, loaded, sets)
        times[config.name] = median_us(calls)
        for mine, wanted in zip(sets[0][1], exact, strict=True):
            distance = float((mine.float() - wanted).norm() / wanted.norm())
            error = max(error, distance if distance == distance else float("inf"))
        loaded.close()
    peers = {"torch": [lambda s=s: case.torch(*s[0]) for s in sets]}
    if compiled:
        fast = torch.compile(case.torch, dynamic=False)
        peers["torch.compile"] = [lambda s=s: fast(*s[0]) for s in sets]
    n = moved // 4
    copies = [torch.randn((2, n), dtype=torch.half, device="cuda") for _ in sets]
    peers["copy"] = [lambda c=c: c[1].copy_(c[0]) for c in copies]
    return {
        "case": f"{case.name} {case.rows}x{case.cols} fp16",
        "bytes": moved,
        "us": times,
        "default": configurations(case.program)[0].name,
        "peers": {name: median_us(calls) for name, calls in peers.items()},
        "error": float(f"{error:.2e}"),
    }


def tensors(case: Case) -> tuple[list[Any], list[Any]]:
    """One set of inputs and outputs."""

    def make(per_row: bool) -> Any:
        shape = (case.rows, case.cols) if per_row else (case.cols,)
        return torch.randn(shape, device="cuda").half()

    return [make(g.kind.per_row) for g in case.program.inputs], [make(True) for _ in case.program.outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop beginning cases after this long")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name holds it")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="where the tree is no checkout")
    arguments = parser.parse_args()
    begun = time.monotonic()
    major, minor = torch.cuda.get_device_capability()
    torch.manual_seed(int(time.time()))
    every = [case for case in cases() if arguments.cases in case.name]
    items = [(case.program, config, 2) for case in every for config in configurations(case.program)]
    cubins = iter(compile_programs(items, (10 * major + minor,), fallback=False))
    for case in every:
        mine = [next(cubins) for _ in configurations(case.program)]
        if time.monotonic() - begun > arguments.seconds:
            print(f"left out for lack of time: {case.name} {case.rows}x{case.cols}")
            continue
        result = measure(case, mine, not arguments.no_compile)
        append(arguments.out, {**environment(arguments.commit), **result})
        us, default = result["us"], result["default"]
        best = min(us, key=us.get)
        peers = "  ".join(f"{name} {us:.1f}" for name, us in result["peers"].items())
        print(
            f"[{time.monotonic() - begun:4.1f} s] {result['case']:36} best {best:10} {us[best]:6.1f}"
            f" ({result['bytes'] / us[best] / 1e6:.2f} TB/s)  default {default:10} {us[default]:6.1f}"
            f"  {peers}  error {result['error']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
