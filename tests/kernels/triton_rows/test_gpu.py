"""The compiled kernels on a GPU, against float64: every program, type and configuration, odd sizes and pointers."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from stof_onnx.kernels.cubin_program import CubinProgram
from stof_onnx.kernels.cubin_run import LoadedProgram
from stof_onnx.kernels.triton_rows import (
    RowConfig,
    RowProgram,
    compile_programs,
    configurations,
    reference,
)
from stof_onnx.kernels.triton_rows.ir import DTYPE_BYTES
from stof_onnx.trt import cuda

from tests.kernels.triton_rows.programs import DTYPES, error_ratio, from_bytes, inputs, named, random_program, to_bytes

pytestmark = pytest.mark.gpu
POISON = 0x7F  # 0x7f7f: a NaN of fp16, 3.4e38 in bf16 and fp32


def run(program: RowProgram, cubin: CubinProgram, arrays: list[np.ndarray], shift: int = 0) -> list[np.ndarray]:
    """The outputs, with every pointer `shift` bytes past its allocation. Guards around outputs must stay."""
    loaded = LoadedProgram(cubin)
    buffers, shapes = [], [array.shape for array in arrays]
    for array, given in zip(arrays, program.inputs, strict=True):
        data = to_bytes(array, given.dtype)
        raw = np.concatenate([np.zeros(shift, np.uint8), data.reshape(-1).view(np.uint8)])
        buffers.append(cuda.Buffer(raw.nbytes))
        buffers[-1].put(raw)
    out_shapes = loaded.output_shapes(shapes)
    widths = [DTYPE_BYTES[out.dtype] for out in program.outputs]
    sizes = [int(np.prod(shape)) * width for shape, width in zip(out_shapes, widths, strict=True)]
    results = [cuda.Buffer(size + shift + 256) for size in sizes]
    for buffer in results:
        buffer.fill(POISON)
    loaded.launch([b.pointer + shift for b in buffers], [b.pointer + shift for b in results], shapes)
    cuda.call("cudaDeviceSynchronize")
    found = []
    for buffer, size, out, shape in zip(results, sizes, program.outputs, out_shapes, strict=True):
        raw = np.empty(buffer.nbytes, np.uint8)
        buffer.get(raw)
        assert (raw[:shift] == POISON).all() and (raw[shift + size :] == POISON).all(), "wrote outside its output"
        found.append(from_bytes(raw[shift : shift + size].copy(), out.dtype, shape))
    loaded.close()
    return found


def check(cases: list[tuple[RowProgram, RowConfig]], arch: int, rows: tuple[int, ...], shift: int = 0) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    compiled = compile_programs([(program, config, 2) for program, config in cases], (arch,))
    for (program, config), cubin in zip(cases, compiled, strict=True):
        for count in rows:
            arrays = inputs(program, count, rng)
            ratio = error_ratio(program, run(program, cubin, arrays, shift), reference(program, arrays))
            assert ratio <= 1.0, f"{ratio:.2f} {program.cols} {config.name} {count} rows: {program.to_json()}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_program_and_configuration(arch: int, dtype: str) -> None:
    cases = [(p, config) for p in named(768, dtype).values() for config in configurations(p)]
    check(cases, arch, (37,))


@pytest.mark.parametrize("cols", [1, 8, 100, 1000, 1024, 2048, 4096, 8192, 11008])
def test_widths(arch: int, cols: int) -> None:
    programs = [p for dtype in ("fp16", "fp32") for p in named(cols, dtype).values()]
    check([(p, configurations(p)[0]) for p in programs], arch, (1, 5))


def test_pointers_that_are_not_aligned(arch: int) -> None:
    """A kernel that assumes 16 bytes would fault or read the wrong elements."""
    check([(p, configurations(p)[0]) for p in named(768, "fp16").values()], arch, (9,), shift=4)


def test_random_programs(arch: int) -> None:
    seed = secrets.randbits(32)
    print(f"program seed {seed}")
    rng = np.random.default_rng(seed)
    programs = [random_program(rng) for _ in range(16)]
    check([(p, configurations(p)[int(rng.integers(0, len(configurations(p))))]) for p in programs], arch, (13,))


def test_more_rows_than_one_wave(arch: int) -> None:
    p = named(768, "fp16")["add_layer_norm_sum"]
    check([(p, configurations(p)[0])], arch, (9001,))


def test_no_rows_is_no_launch(arch: int) -> None:
    p = named(64, "fp16")["layer_norm"]
    cubin = compile_programs([(p, None, 2)], (arch,))[0]
    assert run(p, cubin, inputs(p, 0, np.random.default_rng(0)))[0].shape == (0, 64)
