"""Fused GEMM regions: argument checks (no GPU needed, only the built library), and their results on a Hopper GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import pytest
from stof_onnx.errors import StofError
from stof_onnx.kernels import gemm
from stof_onnx.kernels.capi import DEFAULT_LIBRARY, DType
from stof_onnx.kernels.fused_capi import AUTO_CONFIG, CUBLASLT_CONFIG, Activation, FusedLibrary, FusedParams, Template

torch = pytest.importorskip("torch")

from tests.cuda.fused_harness import cases, check, cublaslt_cases, fuzz  # noqa: E402

pytestmark = pytest.mark.skipif(not DEFAULT_LIBRARY.is_file(), reason="needs `make cuda`")
SEED = int(time.time())
FUZZ_BATCHES, FUZZ_CASES = 4, 40
ROTATION = {"activation": 0, "rotation": 4096, "rotated_columns": 32, "head_dim": 16, "positions": 50}


@pytest.fixture(scope="module")
def library() -> FusedLibrary:
    return FusedLibrary()


def params(template: Template = Template.GEMM_EPILOGUE, **changes: int) -> FusedParams:
    """Valid parameters; nothing follows the pointers."""
    p = FusedParams(
        template_id=template, config=AUTO_CONFIG, dtype=DType.F16, activation=Activation.GELU_ERF, m=100, n=64, k=72,
        a=256, b=512, bias=1024, out=2048, stride_a=72, stride_b=64, stride_out=64,
    )  # fmt: skip
    if template == Template.GEMM_NORM:
        p.activation, p.epsilon = Activation.NONE, 1e-5
    if template == Template.GATED_MLP:
        p.b2, p.stride_b2 = 512, 64
    for name, value in changes.items():
        setattr(p, name, value)
    return p


@pytest.mark.parametrize("template", Template)
def test_every_variant_takes_valid_parameters(library: FusedLibrary, template: Template) -> None:
    configs = library.configs(template)
    assert configs and len({c.name for c in configs}) == len(configs)
    for index, config in enumerate(configs):
        assert config.tile_m % 64 == 0 and config.tile_n % 64 == 0 and config.arch == 90
        assert library.unsupported(params(template, config=index)) is None
    assert library.workspace_bytes(params(template)) == 0
    assert library.unsupported(params(template, m=1, stride_a=72, n=8, k=8)) is None


def test_what_cublaslt_takes(library: FusedLibrary) -> None:
    for activation in (Activation.NONE, Activation.RELU, Activation.GELU_TANH):
        p = params(config=CUBLASLT_CONFIG, activation=activation)
        assert library.unsupported(p) is None
        assert library.workspace_bytes(p) > 0
        assert gemm.cublaslt_lacks(activation.name.lower(), False) == ""
    for activation in (Activation.GELU_ERF, Activation.SILU):
        assert gemm.cublaslt_lacks(activation.name.lower(), False)
    assert gemm.cublaslt_lacks("relu", True) and not gemm.cublaslt_lacks("none", True)
    gated = params(Template.GATED_MLP, config=CUBLASLT_CONFIG)
    assert "neither gates" in (library.unsupported(gated) or "")


def test_where_cublaslt_is_missing_that_is_said(library: FusedLibrary) -> None:
    problem = library.cublaslt_problem()
    assert problem is None or "libcublasLt.so" in problem or "version" in problem
    if problem is not None:
        with pytest.raises(StofError, match="not supported"):
            p = params(config=CUBLASLT_CONFIG, activation=Activation.NONE)
            p.workspace, p.workspace_bytes = 1 << 20, library.workspace_bytes(p)
            library.launch(p)


def test_a_rotation_is_taken(library: FusedLibrary) -> None:
    assert library.unsupported(params(**ROTATION)) is None


def test_the_automatic_choice_counts_a_rotation(library: FusedLibrary) -> None:
    """Its time is hidden behind the products in the ping-pong variants only."""
    sizes = {"m": 32768, "n": 6144, "k": 4096, "stride_a": 4096, "stride_b": 6144, "stride_out": 6144}
    configs = library.configs(Template.GEMM_EPILOGUE)
    assert configs[library.auto_config(params(activation=Activation.NONE, **sizes), 132)].name == "coop_128x256_c2"
    turned = params(**{**ROTATION, "rotated_columns": 5120, "head_dim": 128}, **sizes)
    assert configs[library.auto_config(turned, 132)].name == "pingpong_128x128_c2"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"template_id": 3}, "unknown template"),
        ({"config": 99}, "unknown configuration"),
        ({"config": -3}, "unknown configuration"),
        ({"config": CUBLASLT_CONFIG}, "ReLU and the tanh form"),
        ({"config": CUBLASLT_CONFIG, "activation": Activation.SILU}, "ReLU and the tanh form"),
        (
            {"config": CUBLASLT_CONFIG, "activation": Activation.RELU, "residual": 4096, "stride_residual": 64},
            "residual ahead of the activation",
        ),
        ({"config": CUBLASLT_CONFIG, **ROTATION}, "neither gates nor rotations"),
        ({"dtype": DType.F32}, "fp16 and bf16 only"),
        ({"dtype": 9}, "fp16 and bf16 only"),
        ({"activation": 5}, "unknown activation"),
        ({"activation": -1}, "unknown activation"),
        ({"m": 0}, "not positive"),
        ({"n": -8}, "not positive"),
        ({"n": 60}, "multiple of 8"),
        ({"k": 68}, "multiple of 8"),
        ({"m": 2**31 - 1, "n": 2**20, "stride_b": 2**20, "stride_out": 2**20}, "32-bit"),
        ({"a": None}, "null matrix"),
        ({"out": 2056}, "16-byte aligned"),
        ({"stride_a": 76}, "multiple of 16 bytes"),
        ({"stride_b": 56}, "shorter than its row"),
        ({"stride_out": 2**33}, "too long"),
        ({"bias": 1028}, "bias that is not 16-byte aligned"),
        ({"b2": 512}, "outside a gated region"),
        ({"scale": 512}, "without a norm"),
        ({"sum": 512}, "without a norm"),
        ({"residual": 2048, "stride_residual": 72}, "another row stride"),
        ({"residual": 2048, "stride_residual": 8}, "shorter than its row"),
        ({**ROTATION, "activation": Activation.GELU_ERF}, "beside a gate, a norm, an activation"),
        ({**ROTATION, "residual": 2048, "stride_residual": 64}, "beside a gate, a norm, an activation or a residual"),
        ({**ROTATION, "rotation": 4104}, "rotation that is not 16-byte aligned"),
        ({**ROTATION, "positions": 0}, "without positions"),
        ({**ROTATION, "head_dim": 12}, "no multiple of 8"),
        ({**ROTATION, "rotated_columns": 40}, "no whole heads"),
        ({**ROTATION, "rotated_columns": 80}, "no whole heads"),
        ({**ROTATION, "rotation": None}, "without a rotation"),
    ],
)
def test_bad_parameters_are_refused(library: FusedLibrary, changes: dict[str, int], reason: str) -> None:
    p = params(**changes)
    assert reason in (library.unsupported(p) or "")
    with pytest.raises(StofError, match="fused region launch failed"):
        library.launch(p)


def test_a_gated_region_needs_both_weights_and_has_no_residual(library: FusedLibrary) -> None:
    assert "null matrix" in (library.unsupported(params(Template.GATED_MLP, b2=None)) or "")
    refused = params(Template.GATED_MLP, residual=4096, stride_residual=64)
    assert "gated region with a residual" in (library.unsupported(refused) or "")
    assert "beside a gate" in (library.unsupported(params(Template.GATED_MLP, **ROTATION)) or "")


@pytest.mark.parametrize("template", Template)
@pytest.mark.parametrize("m", [1, 100, 4096, 32768])
def test_the_automatic_choice_is_a_variant(library: FusedLibrary, template: Template, m: int) -> None:
    p = params(template, m=m, n=768, k=768, stride_a=768, stride_b=768, stride_b2=768, stride_out=768)
    assert 0 <= library.auto_config(p, 132) < len(library.configs(template))


def test_a_missing_library_says_how_to_build_it(tmp_path) -> None:
    with pytest.raises(StofError, match="make cuda"):
        FusedLibrary(tmp_path / "libstof_capi.so")


def test_layout_of_the_parameters_matches() -> None:
    assert ctypes.sizeof(FusedParams) == 8 * 4 + 7 * 8 + 5 * 8 + 2 * 8 + (8 + 4 * 4) + (4 * 8 + 2 * 4)


def hopper() -> bool:
    return bool(torch.cuda.is_available()) and torch.cuda.get_device_capability() == (9, 0)


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")(test))


@on_gpu
def test_every_variant_on_the_gpu(library: FusedLibrary) -> None:
    for case in cases(library):
        check(library, case, SEED)


@on_gpu
def test_cublaslt_on_the_gpu(library: FusedLibrary) -> None:
    if library.cublaslt_problem() is not None:
        pytest.skip(str(library.cublaslt_problem()))
    for case in cublaslt_cases():
        check(library, case, SEED)


@on_gpu
@pytest.mark.parametrize("batch", range(FUZZ_BATCHES))
def test_random_combinations(library: FusedLibrary, batch: int) -> None:
    for case in fuzz(library, FUZZ_CASES, SEED + batch):
        check(library, case, SEED)
