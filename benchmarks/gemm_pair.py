"""Two GEMMs in one kernel against two kernels: `python -m benchmarks.gemm_pair [--library LIBSTOF_CAPI]`.

Microseconds a call by CUDA-graph replay over buffers larger than the L2 cache, candidates in turn, median over rounds.
All with two biases, ReLU between the products and a residual, as an adapter has them. Peers: our two GEMM regions;
cuBLAS with bias and ReLU in the first product and bias in the second, then the residual; torch, an operator at a time;
`cublas products`: the two bare products, which is less than was asked for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from stof_onnx.kernels.capi import DType
from stof_onnx.kernels.cubin_run import LoadedProgram
from stof_onnx.kernels.fused_capi import AUTO_CONFIG, Activation, FusedLibrary, FusedParams, Template
from stof_onnx.kernels.gemm_pair import GemmPair, PairConfig, configurations
from stof_onnx.kernels.triton_rows import compile_programs

from benchmarks.fused_gemm import CACHE_BYTES, parser_of, run, time_candidates

Call = Callable[["Buffers", int], None]
HIDDEN = (16, 64, 128)


@dataclass(frozen=True)
class Case:
    rows: int
    depth: int
    hidden: int
    width: int

    def __str__(self) -> str:
        return f"{self.rows};{self.depth}->{self.hidden}->{self.width}"

    @property
    def pair(self) -> GemmPair:
        return GemmPair(self.depth, self.hidden, self.width, "fp16", "relu", "none", True, True, True)


def cases(rows: Iterable[int]) -> list[Case]:
    return [Case(m, k, hidden, k) for m in rows for k in (768, 2048) for hidden in HIDDEN]


class Buffers:
    """Inputs and outputs of one call."""

    def __init__(self, case: Case) -> None:
        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float16, device="cuda") * scale

        m, k, h, n = case.rows, case.depth, case.hidden, case.width
        self.x, self.w1, self.w2 = draw(m, k), draw(k, h, scale=k**-0.5), draw(h, n, scale=h**-0.5)
        self.bias1, self.bias2, self.residual = draw(h), draw(n), draw(m, n)
        self.hidden, self.out = draw(m, h), draw(m, n)

    def bytes(self) -> int:
        return 2 * (self.x.numel() + self.residual.numel() + self.out.numel())


def compiled(each: Iterable[Case]) -> dict[tuple[GemmPair, PairConfig], LoadedProgram]:
    """The kernels of all cases, loaded."""
    wanted = list(dict.fromkeys((case.pair, config) for case in each for config in configurations(case.pair)))
    items = [(pair, config, 2) for pair, config in wanted]
    return dict(zip(wanted, map(LoadedProgram, compile_programs(items, (90,), fallback=False)), strict=True))


def fused(loaded: LoadedProgram) -> Call:
    def call(x: Buffers, stream: int) -> None:
        inputs = [x.x, x.w1, x.w2, x.bias1, x.bias2, x.residual]
        shapes = [tuple(t.shape) for t in inputs]
        loaded.launch([t.data_ptr() for t in inputs], [x.out.data_ptr()], shapes, stream=stream)

    return call


def regions(library: FusedLibrary, case: Case) -> Call:
    """Our two GEMMs, each with its epilogue."""
    m, k, h, n = case.rows, case.depth, case.hidden, case.width

    def call(x: Buffers, stream: int) -> None:
        common = {"template_id": Template.GEMM_EPILOGUE, "config": AUTO_CONFIG, "dtype": DType.F16, "m": m}
        first = FusedParams(
            **common, n=h, k=k, a=x.x.data_ptr(), b=x.w1.data_ptr(), bias=x.bias1.data_ptr(), stride_a=k, stride_b=h,
            stride_out=h, activation=Activation.RELU, out=x.hidden.data_ptr(),
        )  # fmt: skip
        second = FusedParams(
            **common, n=n, k=h, a=x.hidden.data_ptr(), b=x.w2.data_ptr(), bias=x.bias2.data_ptr(), stride_a=h,
            stride_b=n, stride_out=n, residual=x.residual.data_ptr(), stride_residual=n, out=x.out.data_ptr(),
        )  # fmt: skip
        library.launch(first, stream)
        library.launch(second, stream)

    return call


def cublas(x: Buffers, _: int) -> None:
    torch._addmm_activation(x.bias1, x.x, x.w1, use_gelu=False, out=x.hidden)
    torch.addmm(x.bias2, x.hidden, x.w2, out=x.out)
    x.out.add_(x.residual)


def products(x: Buffers, _: int) -> None:
    torch.mm(x.x, x.w1, out=x.hidden)
    torch.mm(x.hidden, x.w2, out=x.out)


def operators(x: Buffers, _: int) -> None:
    hidden = torch.relu(torch.mm(x.x, x.w1) + x.bias1)
    torch.add(torch.mm(hidden, x.w2) + x.bias2, x.residual, out=x.out)


def measure(
    library: FusedLibrary, case: Case, kernels: dict[tuple[GemmPair, PairConfig], LoadedProgram], rounds: int
) -> dict[str, float]:
    """Median microseconds a call of each candidate."""
    first = Buffers(case)
    sets = [first, *(Buffers(case) for _ in range(min(15, CACHE_BYTES // first.bytes())))]
    made = {config.name: fused(kernels[case.pair, config]) for config in configurations(case.pair)}
    made |= {"two regions": regions(library, case), "cublas": cublas}
    made |= {"cublas products": products, "torch": operators}
    flops = 2.0 * case.rows * case.hidden * (case.depth + case.width)
    return time_candidates(made, sets, max(flops, 500e12 * first.bytes() / 4e12), rounds)


def main() -> int:
    arguments = parser_of(__doc__, (32768, 4096, 1024, 128)).parse_args()
    library, start = FusedLibrary(arguments.library), time.time()
    each = cases(arguments.rows)
    kernels = compiled(each)
    print(f"{len(kernels)} kernels loaded after {time.time() - start:.1f} s", flush=True)
    return run(arguments, start, each, lambda case: measure(library, case, kernels, arguments.rounds))


if __name__ == "__main__":
    sys.exit(main())
