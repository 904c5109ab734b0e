"""GEMM with a norm in one kernel against separate kernels: `python -m benchmarks.gemm_norm [--library LIBSTOF_CAPI]`.

Microseconds a call by CUDA-graph replay over buffers larger than the L2 cache, candidates in turn, median over rounds.
Peers, the residual and the sum included: our GEMM with bias and residual, then the norm as a row program; cuBLAS with
bias, then residual and norm as a row program; torch, an operator at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from stof_onnx.kernels.capi import DType
from stof_onnx.kernels.cubin_run import LoadedProgram
from stof_onnx.kernels.fused_capi import AUTO_CONFIG, FusedLibrary, FusedParams, Norm, Template
from stof_onnx.kernels.triton_rows import compile_programs, norm_program

from benchmarks.fused_gemm import CACHE_BYTES, parser_of, run, time_candidates

EPSILON = 1e-5
Call = Callable[["Buffers", int], None]


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    n: int
    norm: Norm = Norm.LAYER
    keep_sum: bool = False

    def __str__(self) -> str:
        return f"{self.m};{self.k}->{self.n} {self.norm.name.lower()}" + " sum" * self.keep_sum


def cases(rows: Sequence[int]) -> list[Case]:
    """Out-projection and second FFN product of BERT-base and BERT-large, without and with the sum; RMSNorm."""
    pairs = [(768, 768), (3072, 768), (1024, 1024), (4096, 1024)]
    found = [Case(m, k, n, Norm.LAYER, keep_sum) for m in rows for k, n in pairs for keep_sum in (False, True)]
    return found + [Case(m, k, 1024, Norm.RMS, keep_sum=True) for m in rows for k in (1024, 4096)]


class Buffers:
    """Inputs and outputs of one call."""

    def __init__(self, case: Case) -> None:
        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float16, device="cuda") * scale

        self.a, self.b = draw(case.m, case.k), draw(case.k, case.n, scale=case.k**-0.5)
        self.bias, self.scale, self.shift = draw(case.n), draw(case.n), draw(case.n)
        self.residual = draw(case.m, case.n)
        self.product, self.sum, self.out = (torch.empty_like(self.residual) for _ in range(3))

    def bytes(self) -> int:
        return 2 * (self.a.numel() + self.b.numel() + 4 * self.residual.numel())


def params(case: Case, x: Buffers, template: Template, config: int) -> FusedParams:
    p = FusedParams(
        template_id=template, config=config, dtype=DType.F16, m=case.m, n=case.n, k=case.k, a=x.a.data_ptr(),
        b=x.b.data_ptr(), bias=x.bias.data_ptr(), residual=x.residual.data_ptr(), stride_a=case.k, stride_b=case.n,
        stride_residual=case.n, stride_out=case.n,
    )  # fmt: skip
    if template == Template.GEMM_EPILOGUE:
        p.out = x.sum.data_ptr()
        return p
    p.out, p.norm, p.epsilon, p.scale = x.out.data_ptr(), int(case.norm), EPSILON, x.scale.data_ptr()
    if case.norm == Norm.LAYER:
        p.shift = x.shift.data_ptr()
    if case.keep_sum:
        p.sum, p.stride_sum = x.sum.data_ptr(), case.n
    return p


def row_norm(case: Case, add: bool) -> Call:
    """The norm as a row program, of the sum or (`add`) of product + residual."""
    kind = "layer_norm" if case.norm == Norm.LAYER else "rms_norm"
    program = norm_program(kind, case.n, "fp16", add=add, keep_sum=add and case.keep_sum, eps=EPSILON)
    loaded = LoadedProgram(compile_programs([(program, None, 2)], (90,))[0])

    def call(x: Buffers, stream: int) -> None:
        inputs = [*([x.product, x.residual] if add else [x.sum]), x.scale]
        if case.norm == Norm.LAYER:
            inputs.append(x.shift)
        outputs = [x.sum, x.out] if add and case.keep_sum else [x.out]
        shapes = [tuple(t.shape) for t in inputs]
        loaded.launch([t.data_ptr() for t in inputs], [t.data_ptr() for t in outputs], shapes, stream=stream)

    return call


def torch_norm(case: Case, x: Buffers) -> None:
    total = torch.add(torch.addmm(x.bias, x.a, x.b, out=x.product), x.residual, out=x.sum)
    if case.norm == Norm.LAYER:
        torch.nn.functional.layer_norm(total, (case.n,), x.scale, x.shift, EPSILON)
    else:
        torch.nn.functional.rms_norm(total, (case.n,), x.scale, EPSILON)


def candidates(library: FusedLibrary, case: Case, sets: list[Buffers]) -> dict[str, Call]:
    """Each candidate's call on a set of buffers, on a stream."""

    def fused(template: Template, config: int) -> Call:
        made = {id(x): params(case, x, template, config) for x in sets}
        return lambda x, stream: library.launch(made[id(x)], stream)

    result: dict[str, Call] = {}
    for index, config in enumerate(library.configs(Template.GEMM_NORM)):
        if library.unsupported(params(case, sets[0], Template.GEMM_NORM, index)) is None:
            result[config.name] = fused(Template.GEMM_NORM, index)
    gemm, norm, add_norm = fused(Template.GEMM_EPILOGUE, AUTO_CONFIG), row_norm(case, False), row_norm(case, True)

    def separate(x: Buffers, stream: int) -> None:
        gemm(x, stream)
        norm(x, stream)

    def cublas(x: Buffers, stream: int) -> None:
        torch.addmm(x.bias, x.a, x.b, out=x.product)
        add_norm(x, stream)

    result["gemm"] = gemm
    result["gemm, norm"] = separate
    result["cublas, add norm"] = cublas
    result["torch"] = lambda x, _: torch_norm(case, x)
    return result


def measure(library: FusedLibrary, case: Case, rounds: int) -> dict[str, float]:
    """Median microseconds a call of each candidate."""
    first = Buffers(case)
    sets = [first, *(Buffers(case) for _ in range(min(15, CACHE_BYTES // first.bytes())))]
    return time_candidates(candidates(library, case, sets), sets, 2.0 * case.m * case.n * case.k, rounds)


def main() -> int:
    arguments = parser_of(__doc__, (32768, 4096, 1024, 128)).parse_args()
    library, start = FusedLibrary(arguments.library), time.time()
    return run(arguments, start, cases(arguments.rows), lambda case: measure(library, case, arguments.rounds))


if __name__ == "__main__":
    sys.exit(main())
