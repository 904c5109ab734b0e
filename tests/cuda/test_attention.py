"""The correctness matrix on a GPU (marked `gpu`: skipped without one, or without the built library)."""

from __future__ import annotations

import time

import pytest
from stof_onnx.kernels.capi import DEFAULT_LIBRARY, Kernel, KernelLibrary

torch = pytest.importorskip("torch")

from tests.cuda import matrix  # noqa: E402
from tests.cuda.harness import Case, check  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not DEFAULT_LIBRARY.is_file(), reason="needs `make cuda`"),
]
SEED = int(time.time())
FUZZ_BATCHES, FUZZ_CASES, HOPPER_FUZZ_CASES = 10, 60, 100


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return KernelLibrary()


@pytest.mark.parametrize("case", [case for group in matrix.GROUPS.values() for case in group()], ids=str)
def test_case(library: KernelLibrary, case: Case) -> None:
    if case.kernel == Kernel.BLOCK_SM90 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    check(library, case, SEED)


@pytest.mark.parametrize("batch", range(FUZZ_BATCHES))
def test_random_combinations(library: KernelLibrary, batch: int) -> None:
    for case in matrix.fuzz(FUZZ_CASES, SEED + batch):
        check(library, case, SEED)


@pytest.mark.parametrize("batch", range(FUZZ_BATCHES))
def test_random_combinations_on_hopper(library: KernelLibrary, batch: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    for case in matrix.hopper_fuzz(HOPPER_FUZZ_CASES, SEED + batch):
        check(library, case, SEED)
