"""Fused GEMM regions against cuBLAS through torch: `python benchmarks/fused_gemm.py [--library LIBSTOF_CAPI]`.

Each candidate is a CUDA graph of calls that rotate through buffers larger than the L2 cache; candidates of a case take
turns, and the median over the rounds is reported. Peers: `torch.addmm` and the operators that follow it, one kernel
each; `torch._addmm_activation`, which is cuBLASLt's GELU (tanh) epilogue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stof_onnx.kernels.capi import DEFAULT_LIBRARY, DType
from stof_onnx.kernels.fused_capi import Activation, FusedLibrary, FusedParams, Template

HEAD_DIM, POSITIONS = 64, 2048  # of rotary position embeddings
CACHE_BYTES = 120 << 20  # what the buffers of a graph exceed together
DTYPES = {"f16": (torch.float16, DType.F16), "bf16": (torch.bfloat16, DType.BF16)}


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    n: int
    activation: Activation = Activation.NONE
    bias: bool = True
    residual: bool = False
    gated: bool = False
    rotated: int = 0  # columns, in heads of HEAD_DIM at POSITIONS positions

    def __str__(self) -> str:
        parts = [f"{self.m};{self.k}->{self.n}", self.activation.name.lower()]
        parts += ["bias"] * self.bias + ["residual"] * self.residual + ["gated"] * self.gated
        parts += [f"rotated {self.rotated}"] * bool(self.rotated)
        return " ".join(parts)


def cases(rows: list[int]) -> list[Case]:
    """BERT/GPT-2's four products with the epilogues they have there, and LLaMA's: packed Q, K, V with rotation and
    without, the gated MLP, the down-projection."""
    result = []
    for m in rows:
        result += [
            Case(m, 768, 2304),
            Case(m, 768, 768, residual=True),
            Case(m, 768, 768),
            Case(m, 768, 3072, Activation.GELU_ERF),
            Case(m, 768, 3072, Activation.GELU_TANH),
            Case(m, 768, 3072),
            Case(m, 3072, 768, residual=True),
            Case(m, 3072, 768),
            Case(m, 2048, 6144, bias=False, rotated=4096),
            Case(m, 2048, 6144, bias=False),
            Case(m, 2048, 5632, Activation.SILU, bias=False, gated=True),
            Case(m, 5632, 2048, bias=False, residual=True),
        ]
    return result


class Buffers:
    """Inputs and outputs of one call."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str = "cuda") -> None:
        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, dtype=dtype, device=device) * scale

        self.a = draw(case.m, case.k)
        self.b = draw(case.k, case.n, scale=case.k**-0.5)
        self.b2 = draw(case.k, case.n, scale=case.k**-0.5) if case.gated else None
        self.bias = draw(case.n) if case.bias else None
        self.residual = draw(case.m, case.n) if case.residual else None
        angles = torch.rand(POSITIONS, HEAD_DIM // 2, device=device) * 6.28
        self.turns = torch.stack([angles.cos(), angles.sin()], -1) if case.rotated else None
        self.cos, self.sin = (torch.cat([f(angles)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
        self.out = torch.empty(case.m, case.n, dtype=dtype, device=device)

    def bytes(self) -> int:
        tensors = (self.a, self.b, self.b2, self.residual, self.out)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def params(case: Case, buffers: Buffers, dtype: DType, config: int) -> FusedParams:
    template = Template.GATED_MLP if case.gated else Template.GEMM_EPILOGUE
    p = FusedParams(
        template_id=template, config=config, dtype=dtype, activation=case.activation, m=case.m, n=case.n, k=case.k,
        a=buffers.a.data_ptr(), b=buffers.b.data_ptr(), out=buffers.out.data_ptr(), stride_a=case.k, stride_b=case.n,
        stride_out=case.n,
    )  # fmt: skip
    if buffers.b2 is not None:
        p.b2, p.stride_b2 = buffers.b2.data_ptr(), case.n
    if buffers.bias is not None:
        p.bias = buffers.bias.data_ptr()
    if buffers.residual is not None:
        p.residual, p.stride_residual = buffers.residual.data_ptr(), case.n
    if buffers.turns is not None:
        p.rotation, p.rotated_columns = buffers.turns.data_ptr(), case.rotated
        p.head_dim, p.positions = HEAD_DIM, POSITIONS
    return p


def unfused(case: Case, x: Buffers) -> torch.Tensor:
    """The region as torch runs it: cuBLAS with the bias as its epilogue, then a kernel an operator."""
    functional = torch.nn.functional
    if x.bias is None:
        torch.mm(x.a, x.b, out=x.out)
    else:
        torch.addmm(x.bias, x.a, x.b, out=x.out)
    y = x.out
    if case.activation in (Activation.GELU_ERF, Activation.GELU_TANH):
        y = functional.gelu(y, approximate="none" if case.activation == Activation.GELU_ERF else "tanh")
    elif case.activation == Activation.SILU:
        y = functional.silu(y, inplace=True)
    elif case.activation == Activation.RELU:
        y = torch.relu_(y)
    if x.b2 is not None:
        y = y.mul_(torch.mm(x.a, x.b2))
    if x.residual is not None:
        y.add_(x.residual)
    if case.rotated:
        heads = y[:, : case.rotated].unflatten(1, (-1, HEAD_DIM))
        cos, sin = (t.repeat(-(-case.m // POSITIONS), 1)[: case.m, None] for t in (x.cos, x.sin))
        first, second = heads.chunk(2, -1)
        heads.copy_(heads * cos + torch.cat([-second, first], -1) * sin)
    return y


def product_only(x: Buffers) -> None:
    torch.mm(x.a, x.b, out=x.out)
    if x.b2 is not None:
        torch.mm(x.a, x.b2, out=x.out)


def run_unfused(case: Case, x: Buffers) -> None:
    unfused(case, x)


def lt_gelu(x: Buffers) -> None:
    torch._addmm_activation(x.bias, x.a, x.b, use_gelu=True, out=x.out)


def candidates(
    library: FusedLibrary, case: Case, sets: list[Buffers], dtype: DType
) -> dict[str, Callable[[Buffers, int], None]]:
    """Each candidate's call on a set of buffers, on a stream."""
    template = Template.GATED_MLP if case.gated else Template.GEMM_EPILOGUE
    result: dict[str, Callable[[Buffers, int], None]] = {}

    def fused(config: int) -> Callable[[Buffers, int], None]:
        made = {id(x): params(case, x, dtype, config) for x in sets}
        return lambda x, stream: library.launch(made[id(x)], stream)

    for index, config in enumerate(library.configs(template)):
        result[config.name] = fused(index)
    result["cublas_product"] = lambda x, _: product_only(x)
    result["cublas_unfused"] = lambda x, _: run_unfused(case, x)
    if case.activation == Activation.GELU_TANH and case.bias and not case.residual:
        result["cublaslt_gelu"] = lambda x, _: lt_gelu(x)
    return result


def capture(call: Callable[[Any, int], None], sets: Sequence[Any], calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(sets[0], stream.cuda_stream)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(sets[i % len(sets)], stream.cuda_stream)
    return graph


def time_candidates(
    made: Mapping[str, Callable[[Any, int], None]], sets: Sequence[Any], flops: float, rounds: int
) -> dict[str, float]:
    """Median microseconds a call of each candidate, by graphs of enough calls to time one of `flops`, in turn."""
    calls = max(2, min(40, int(3e-3 / (flops / 500e12 + 3e-6))))
    graphs = {name: capture(call, sets, calls) for name, call in made.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if turn > 0:  # the first one warms up
                times[name].append(start.elapsed_time(stop) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(library: FusedLibrary, case: Case, dtype_name: str, rounds: int) -> dict[str, float]:
    """Median microseconds a call of each candidate."""
    torch_dtype, dtype = DTYPES[dtype_name]
    first = Buffers(case, torch_dtype)
    sets = [first, *(Buffers(case, torch_dtype) for _ in range(min(15, CACHE_BYTES // first.bytes())))]
    flops = 2.0 * case.m * case.n * case.k * (2 if case.gated else 1)
    return time_candidates(candidates(library, case, sets, dtype), sets, flops, rounds)


def parser_of(description: str | None, rows: Sequence[int]) -> argparse.ArgumentParser:
    """Options of a benchmark of GEMM kernels, as `run` takes them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=str(DEFAULT_LIBRARY))
    parser.add_argument("--rows", type=int, nargs="+", default=list(rows))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case is begun")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    return parser


def usual_line(case: Any, times: Mapping[str, float]) -> str:
    return f"[{case}] " + "  ".join(f"{name}: {value:.1f}" for name, value in by_time(times))


def by_time(times: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: item[1])


def run(
    arguments: argparse.Namespace,
    start: float,
    cases: Iterable[Any],
    measure: Callable[[Any], dict[str, float]],
    dtype: str = "f16",
    line: Callable[[Any, Mapping[str, float]], str] = usual_line,
) -> int:
    """Measures case after case, prints a line each and appends it to --out. Exit code 1 where the time was up.

    Args:
        start: of the limit, by time.time().
    """
    for case in cases:
        if time.time() - start > arguments.limit:
            print("time is up", flush=True)
            return 1
        times = measure(case)
        print(line(case, times), flush=True)
        if arguments.out:
            record = {"case": str(case), "dtype": dtype, "gpu": torch.cuda.get_device_name(), "us": times}
            with arguments.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return 0


def line_with_rate(case: Case, times: Mapping[str, float]) -> str:
    flops = 2.0 * case.m * case.n * case.k * (2 if case.gated else 1)
    row = "  ".join(f"{name} {value:.1f}" for name, value in by_time(times))
    return f"{case} [{flops / min(times.values()) * 1e-6:.0f} TFLOP/s]: {row}"


def main() -> int:
    parser = parser_of(__doc__, (32768, 4096, 128))
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="f16")
    arguments = parser.parse_args()
    library, start = FusedLibrary(arguments.library), time.time()

    def one(case: Case) -> dict[str, float]:
        return measure(library, case, arguments.dtype, arguments.rounds)

    return run(arguments, start, cases(arguments.rows), one, arguments.dtype, line_with_rate)


if __name__ == "__main__":
    sys.exit(main())
