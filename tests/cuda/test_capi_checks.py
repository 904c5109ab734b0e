"""The C API's argument checks run without a GPU (skipped where `make cuda` has not built the library)."""

from __future__ import annotations

import ctypes

import pytest
from stof_onnx.errors import StofError
from stof_onnx.kernels import capi

torch = pytest.importorskip("torch")

from tests.cuda import matrix  # noqa: E402
from tests.cuda.harness import Case, Inputs  # noqa: E402

pytestmark = pytest.mark.skipif(not capi.DEFAULT_LIBRARY.is_file(), reason="needs `make cuda`")


@pytest.fixture(scope="module")
def library() -> capi.KernelLibrary:
    return capi.KernelLibrary()


def params(case: Case) -> capi.AttentionParams:
    """Of host tensors: the checks look at pointers but never follow them."""
    inputs = Inputs(case, 0, device="cpu")
    p = inputs.params(inputs.output()[0])
    p._keep_alive = inputs
    return p


def small_cases() -> list[Case]:
    cases = (
        [case for group in matrix.GROUPS.values() for case in group()]
        + matrix.fuzz(100, 7)
        + matrix.hopper_fuzz(100, 7)
        + matrix.every_instance()
    )
    return [case for case in cases if case.seq_q * case.seq_kv <= 1000 * 1000]


def test_every_case_of_the_matrix_is_supported(library: capi.KernelLibrary) -> None:
    reasons = {str(case): library.unsupported(params(case)) for case in small_cases()[::3]}
    assert {name: why for name, why in reasons.items() if why} == {}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dim", 20, "multiples of 8"),
        ("dim", 264, "up to 256"),
        ("v_dim", 0, "multiples of 8"),
        ("heads", 3, "multiple of kv_heads"),
        ("batch", 0, "not positive"),
        ("dtype", 7, "enumerator"),
        ("kernel", -1, "enumerator"),
        ("masked_row", 4, "enumerator"),
        ("scale", float("nan"), "scale"),
        ("softcap", -1.0, "softcap"),
        ("seq_q", 200, "smaller than"),
        ("bias_kind", 1, "null bias"),
        ("kv_kind", 2, "null kv"),
        ("splits", 1000, "splits"),
    ],
)
def test_bad_parameters_are_named(library: capi.KernelLibrary, field: str, value: float, words: str) -> None:
    p = params(Case("causal", heads=4, kv_heads=2, seq_q=128, seq_kv=128))
    assert library.unsupported(p) is None
    setattr(p, field, value)
    assert words in (library.unsupported(p) or "")
    with pytest.raises(StofError, match="attention launch failed"):
        library.forward(p)


def test_bad_mask_and_tensors_are_named(library: capi.KernelLibrary) -> None:
    def reason(change) -> str:
        p = params(Case("causal"))
        change(p)
        return library.unsupported(p) or ""

    assert "null mask array" in reason(lambda p: setattr(p.mask, "bitmap", None))
    assert "multiples of 8" in reason(lambda p: setattr(p.mask, "tile_n", 12))
    assert "tile_n = 32, 64 or 128" in reason(lambda p: setattr(p.mask, "tile_n", 256))
    assert "mask_index" in reason(lambda p: setattr(p.mask, "index_h", 5))
    assert "null tensor" in reason(lambda p: setattr(p.q, "ptr", None))
    assert "16-byte aligned" in reason(lambda p: setattr(p.k, "ptr", p.k.ptr + 2))
    assert "multiple of 16 bytes" in reason(lambda p: setattr(p.v, "stride_s", 65))
    assert "splits = 1" in reason(lambda p: (setattr(p, "splits", 2), setattr(p, "masked_row", capi.MaskedRow.MEAN)))


@pytest.mark.parametrize(("splits", "split_rows", "rows"), [(1, 0, 0), (4, 0, 3), (4, 1, 1), (3, 2, 2)])
def test_workspace_is_that_of_the_split_rows(
    library: capi.KernelLibrary, splits: int, split_rows: int, rows: int
) -> None:
    p = params(Case("causal", 2, 2, 2, 130, 130, 64, 64, splits=splits, split_rows=split_rows))
    slots = 2 * 2 * rows * splits if splits > 1 else 0
    assert library.workspace_bytes(p) == slots * 64 * (64 + 2) * 4


def test_a_split_without_workspace_is_refused(library: capi.KernelLibrary) -> None:
    p = params(Case("causal", splits=2))
    with pytest.raises(StofError, match="attention launch failed"):
        library.forward(p)


def test_a_missing_library_says_how_to_build_it(tmp_path) -> None:
    with pytest.raises(StofError, match="make cuda"):
        capi.KernelLibrary(tmp_path / "libstof_capi.so")


def test_layout_of_the_parameters_matches(library: capi.KernelLibrary) -> None:
    assert ctypes.sizeof(capi.AttentionParams) % 8 == 0
