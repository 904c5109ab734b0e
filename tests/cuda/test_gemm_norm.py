"""GEMM with a norm: argument checks (no GPU needed, only the built library), and results on a Hopper GPU."""

from __future__ import annotations

import math

import pytest
from stof_onnx.errors import StofError
from stof_onnx.kernels.capi import DEFAULT_LIBRARY
from stof_onnx.kernels.fused_capi import Activation, FusedLibrary, Norm, Template

torch = pytest.importorskip("torch")

from tests.cuda.gemm_norm_harness import cases, check, fuzz, widths  # noqa: E402
from tests.cuda.test_fused import SEED, library, on_gpu, params  # noqa: E402, F401

pytestmark = pytest.mark.skipif(not DEFAULT_LIBRARY.is_file(), reason="needs `make cuda`")
FUZZ_BATCHES, FUZZ_CASES = 3, 40


@pytest.mark.parametrize("norm", Norm)
def test_vectors_and_the_sum_are_optional(library: FusedLibrary, norm: Norm) -> None:  # noqa: F811
    assert library.unsupported(params(Template.GEMM_NORM, norm=norm)) is None
    p = params(Template.GEMM_NORM, norm=norm, scale=256, shift=512, sum=4096, stride_sum=64, residual=4096)
    p.stride_residual = 64
    assert library.unsupported(p) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm": 2}, "unknown norm"),
        ({"norm": -1}, "unknown norm"),
        ({"activation": Activation.RELU}, "activation ahead of a norm"),
        ({"epsilon": -1e-6}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"scale": 264}, "scale or shift"),
        ({"shift": 264}, "scale or shift"),
        ({"sum": 4096, "stride_sum": 56}, "shorter than its row"),
        ({"sum": 2048, "stride_sum": 64}, "in the place of the output"),
        ({"sum": 4096, "stride_sum": 72, "residual": 4096, "stride_residual": 64}, "another row stride"),
        ({"b2": 512}, "outside a gated region"),
        ({"config": 99}, "unknown configuration"),
        ({"n": 1544, "stride_b": 1544, "stride_out": 1544}, "rows too long"),
    ],
)
def test_bad_parameters_are_refused(library: FusedLibrary, changes: dict[str, int], reason: str) -> None:  # noqa: F811
    p = params(Template.GEMM_NORM, **changes)
    assert reason in (library.unsupported(p) or "")
    with pytest.raises(StofError, match="fused region launch failed"):
        library.launch(p)


def test_each_variant_takes_rows_of_a_whole_cluster_and_no_more(library: FusedLibrary) -> None:  # noqa: F811
    for index in range(len(library.configs(Template.GEMM_NORM))):
        longest = max(widths(library, index))
        for n, reason in ((longest, None), (longest + 8, "rows too long for the norm's clusters of blocks")):
            p = params(Template.GEMM_NORM, config=index, n=n, stride_b=n, stride_out=n)
            assert library.unsupported(p) == reason


@pytest.mark.parametrize("n", [64, 768, 1024, 1536])
def test_the_automatic_choice_holds_the_row(library: FusedLibrary, n: int) -> None:  # noqa: F811
    for m in (1, 128, 4096, 32768):
        p = params(Template.GEMM_NORM, m=m, n=n, stride_b=n, stride_out=n)
        p.config = library.auto_config(p, 132)
        assert p.config >= 0 and library.unsupported(p) is None


@on_gpu
def test_every_variant_on_the_gpu(library: FusedLibrary) -> None:  # noqa: F811
    print(f"seed {SEED}")
    for case in cases(library):
        check(library, case, SEED)


@on_gpu
@pytest.mark.parametrize("batch", range(FUZZ_BATCHES))
def test_random_combinations(library: FusedLibrary, batch: int) -> None:  # noqa: F811
    print(f"seed {SEED + batch}")
    for case in fuzz(library, FUZZ_CASES, SEED + batch):
        check(library, case, SEED)
