"""The compiled kernels on a GPU, against float64: every configuration, odd sizes and pointers, both types."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from stof_onnx.kernels.cubin_program import CubinProgram
from stof_onnx.kernels.cubin_run import LoadedProgram
from stof_onnx.kernels.gemm_pair import GemmPair, PairConfig, configurations
from stof_onnx.kernels.triton_rows import compile_programs
from stof_onnx.trt import cuda

from tests.kernels.gemm_pair.cases import error_ratio, inputs, pairs, random_pair
from tests.kernels.triton_rows.conftest import arch  # noqa: F401
from tests.kernels.triton_rows.programs import from_bytes, to_bytes

pytestmark = pytest.mark.gpu
POISON = 0x7F  # 0x7f7f: a NaN of fp16, 3.4e38 in bf16
GUARD = 4096


def run(pair: GemmPair, cubin: CubinProgram, arrays: dict[str, np.ndarray], shift: int = 0) -> np.ndarray:
    """The output, with every pointer `shift` bytes past its allocation. Guards around it must stay.

    Inputs lie between NaNs: what is read beyond them and not masked shows.
    """
    loaded = LoadedProgram(cubin)
    buffers, shapes = [], [array.shape for array in arrays.values()]
    for array in arrays.values():
        data = to_bytes(array, pair.dtype).reshape(-1).view(np.uint8)
        buffers.append(cuda.Buffer(data.nbytes + shift + 2 * GUARD))
        raw = np.full(buffers[-1].nbytes, 0xFF, np.uint8)
        raw[GUARD + shift :][: data.nbytes] = data
        buffers[-1].put(raw)
    (shape,) = loaded.output_shapes(shapes)
    size = 2 * int(np.prod(shape))
    result = cuda.Buffer(size + shift + 2 * GUARD)
    result.fill(POISON)
    start = GUARD + shift
    loaded.launch([b.pointer + start for b in buffers], [result.pointer + start], shapes)
    cuda.call("cudaDeviceSynchronize")
    raw = np.empty(result.nbytes, np.uint8)
    result.get(raw)
    assert (raw[:start] == POISON).all() and (raw[start + size :] == POISON).all(), "wrote outside its output"
    loaded.close()
    for buffer in (*buffers, result):
        buffer.free()
    return from_bytes(raw[start : start + size].copy(), pair.dtype, shape)


def check(cases: list[tuple[GemmPair, PairConfig]], arch: int, rows: tuple[int, ...], shift: int = 0) -> None:  # noqa: F811
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    compiled = compile_programs([(pair, config, 2) for pair, config in cases], (arch,))
    wrong = []
    for (pair, config), cubin in zip(cases, compiled, strict=True):
        for count in rows:
            arrays = inputs(pair, count, rng)
            first, again = (run(pair, cubin, arrays, shift) for _ in range(2))
            ratio = error_ratio(pair, arrays, first)
            if not ratio <= 1.0 or not np.array_equal(first, again):
                wrong.append(f"{ratio:.2f} {config.name} {count} rows: {pair.to_json()}")
    assert not wrong, "\n".join(wrong)


def test_every_pair(arch: int) -> None:  # noqa: F811
    check([(pair, configurations(pair)[0]) for pair in pairs()], arch, (1, 133))


@pytest.mark.parametrize("hidden", [16, 64, 96, 128])
def test_every_configuration(arch: int, hidden: int) -> None:  # noqa: F811
    for dtype in ("fp16", "bf16"):
        pair = GemmPair(328, hidden, 392, dtype, "gelu_tanh", "none", True, True, True)
        check([(pair, config) for config in configurations(pair)], arch, (1, 129, 1000))


def test_pointers_that_are_not_aligned(arch: int) -> None:  # noqa: F811
    """A kernel that assumes 16 bytes would fault or read the wrong elements."""
    check([(pair, configurations(pair)[0]) for pair in list(pairs())[:6]], arch, (9,), shift=4)


def test_random_pairs(arch: int) -> None:  # noqa: F811
    seed = secrets.randbits(32)
    print(f"pair seed {seed}")
    rng = np.random.default_rng(seed)
    found = [random_pair(rng) for _ in range(12)]
    check([(p, configurations(p)[int(rng.integers(0, len(configurations(p))))]) for p in found], arch, (77,))


def test_more_rows_than_one_wave(arch: int) -> None:  # noqa: F811
    pair = GemmPair(768, 64, 768, "fp16", "relu", "none", True, True, True)
    check([(pair, config) for config in configurations(pair)[:4]], arch, (20001,))


def test_no_rows_is_no_launch(arch: int) -> None:  # noqa: F811
    pair = GemmPair(64, 16, 64, "fp16")
    cubin = compile_programs([(pair, None, 2)], (arch,))[0]
    assert run(pair, cubin, inputs(pair, 0, np.random.default_rng(0))).shape == (0, 64)
