"""The benchmark of fused GEMM regions: its peers compute the region, its parameters are ones the library takes."""

from __future__ import annotations

import pytest
from stof_onnx.kernels.capi import DEFAULT_LIBRARY, DType
from stof_onnx.kernels.fused_capi import AUTO_CONFIG, Activation, FusedLibrary

torch = pytest.importorskip("torch")

from benchmarks.fused_gemm import Buffers, Case, cases, params, unfused  # noqa: E402

CASES = [
    Case(5, 16, 24, activation, bias, residual and not gated, gated)
    for activation in Activation
    for bias in (False, True)
    for residual, gated in ((False, False), (True, False), (False, True))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_separate_kernels_compute_the_region(case: Case) -> None:
    x = Buffers(case, torch.float64, "cpu")
    zero = torch.zeros(case.n, dtype=torch.float64)
    wanted = x.a @ x.b + (zero if x.bias is None else x.bias)
    functional = torch.nn.functional
    wanted = {
        Activation.NONE: lambda y: y,
        Activation.RELU: functional.relu,
        Activation.GELU_ERF: functional.gelu,
        Activation.GELU_TANH: lambda y: functional.gelu(y, approximate="tanh"),
        Activation.SILU: functional.silu,
    }[case.activation](wanted)
    if x.b2 is not None:
        wanted = wanted * (x.a @ x.b2)
    if x.residual is not None:
        wanted = wanted + x.residual
    torch.testing.assert_close(unfused(case, x), wanted)


@pytest.mark.skipif(not DEFAULT_LIBRARY.is_file(), reason="needs `make cuda`")
def test_the_library_takes_every_case() -> None:
    library = FusedLibrary()
    for case in cases([1, 128, 32768]):
        small = Case(8, case.k, case.n, case.activation, case.bias, case.residual, case.gated)
        p = params(small, Buffers(small, torch.float16, "cpu"), DType.F16, AUTO_CONFIG)
        p.m = case.m
        for name in ("a", "b", "out", "bias", "b2", "residual"):  # what torch gives on the CPU need not be aligned
            if getattr(p, name):
                setattr(p, name, 256)
        assert library.unsupported(p) is None, case


def test_cases_are_distinct() -> None:
    assert len({str(case) for case in cases([1, 128])}) == len(cases([1, 128])) == 24
