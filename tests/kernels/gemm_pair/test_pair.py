"""Pairs of GEMMs without a GPU: the generated kernels in Triton's interpreter against float64, checks, estimates."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stof_onnx.errors import StofError
from stof_onnx.kernels import gemm
from stof_onnx.kernels.gemm_pair import GemmPair, PairConfig, configurations, estimate_us, ranked
from stof_onnx.kernels.gemm_pair.configs import fits
from stof_onnx.kernels.gemm_pair.reference import reference
from stof_onnx.kernels.gemm_pair.source import source
from stof_onnx.kernels.triton_rows import compile_program
from stof_onnx.kernels.triton_rows.cache import KernelCache, triton_version

from tests.kernels import interpreted
from tests.kernels.gemm_pair.cases import error_ratio, inputs, pairs, random_pair
from tests.kernels.triton_rows.programs import rounded

needs_triton = pytest.mark.skipif(triton_version() is None, reason="needs triton")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[subprocess.Popen[str]]:
    with interpreted.interpreter("tests.kernels.gemm_pair.interpret") as process:
        yield process


def check(interpreter: subprocess.Popen[str], pair: GemmPair, config: PairConfig, rows: int) -> None:
    """Against float64. fp16 only: the interpreter multiplies the bits of bf16 numbers."""
    seed = secrets.randbits(32)
    answer = interpreted.ask(interpreter, pair.to_json(), config.name, rows, seed)
    assert answer and float(answer) <= 1.0, f"{answer} {config.name} {rows} rows, seed {seed}: {pair.to_json()}"


def test_every_pair(interpreter: subprocess.Popen[str]) -> None:
    for pair in pairs():
        if pair.dtype == "fp16":
            check(interpreter, pair, configurations(pair)[0], 33)


@pytest.mark.parametrize("hidden", [24, 64, 128])
def test_every_configuration(interpreter: subprocess.Popen[str], hidden: int) -> None:
    pair = GemmPair(136, hidden, 392, "fp16", "relu", "none", True, True, True)
    for config in configurations(pair):
        check(interpreter, pair, config, 131)


def test_random_pairs(interpreter: subprocess.Popen[str]) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    pair = random_pair(rng)
    for _ in range(12):
        pair = random_pair(rng)
        found = configurations(pair)
        fp16 = GemmPair(**{**pair.__dict__, "dtype": "fp16"})
        check(interpreter, fp16, found[int(rng.integers(0, len(found)))], int(rng.integers(1, 70)))


def test_the_reference_is_the_formula() -> None:
    """Of torch's own functions, in float64; the hidden rows are the only ones that are rounded."""
    torch = pytest.importorskip("torch")
    functions = {
        "none": lambda x: x,
        "relu": torch.relu,
        "gelu_erf": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for pair in (random_pair(rng) for _ in range(10)):
        arrays = inputs(pair, 5, rng)
        v = {name: torch.from_numpy(array).double() for name, array in arrays.items()}
        hidden = functions[pair.inner](v["x"] @ v["w1"] + v.get("bias1", 0.0))
        hidden = torch.from_numpy(rounded(hidden.numpy(), pair.dtype)).double()
        out = functions[pair.outer](hidden @ v["w2"] + v.get("bias2", 0.0)) + v.get("residual", 0.0)
        np.testing.assert_allclose(reference(pair, arrays), out.numpy(), rtol=1e-12, atol=1e-12)


def test_the_bound_finds_small_errors() -> None:
    """An error of a fourth part of a rounding of the hidden rows' sum, or of two roundings of the output."""
    pair = GemmPair(64, 32, 64, "fp16", inner_bias=True, outer_bias=True)
    arrays = inputs(pair, 50, np.random.default_rng(0))
    exact = reference(pair, arrays)
    assert error_ratio(pair, arrays, exact.astype(np.float16).astype(np.float32)) <= 1.0
    assert error_ratio(pair, arrays, exact * (1 + 2.0**-8)) > 1.0
    assert error_ratio(pair, {**arrays, "bias2": arrays["bias2"] * 1.01}, exact.astype(np.float32)) > 1.0
    assert error_ratio(pair, {**arrays, "bias1": arrays["bias1"] * 1.01}, exact.astype(np.float32)) > 1.0
    assert error_ratio(pair, arrays, np.full_like(exact, np.nan)) == float("inf")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"depth": 12}, "multiples of 8"),
        ({"hidden": 0}, "multiples of 8"),
        ({"width": 1 << 17}, "multiples of 8"),
        ({"hidden": 136}, "at most 128 fit"),
        ({"dtype": "fp32"}, "unknown"),
        ({"inner": "tanh"}, "unknown"),
        ({"outer": ""}, "unknown"),
    ],
)
def test_what_no_kernel_computes(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(StofError, match=reason):
        GemmPair(**{**GemmPair(64, 64, 64, "fp16").__dict__, **changes})


def test_text_of_pairs_and_configurations() -> None:
    rng = np.random.default_rng(0)
    for pair in (random_pair(rng) for _ in range(5)):
        assert GemmPair.from_json(pair.to_json()) == pair
        for config in configurations(pair):
            assert PairConfig.parse(config.name) == config
    for name in ("", "auto", "b256r1w4", "m64n64k64p1w4", "m64n64k64p1w4s3 ", "m-64n64k64p1w4s3"):
        with pytest.raises(StofError, match="no configuration"):
            PairConfig.parse(name)


@pytest.mark.parametrize("name", ["m48n64k64p1w4s3", "m8n64k64p1w4s3", "m64n64k64p0w4s3", "m64n64k64p1w3s3"])
def test_configurations_that_are_none(name: str) -> None:
    with pytest.raises(StofError, match="no configuration"):
        source(GemmPair(64, 64, 64, "fp16"), PairConfig.parse(name))


def test_a_configuration_that_would_spill_is_refused() -> None:
    pair, config = GemmPair(768, 128, 768, "fp16"), PairConfig(64, 256, 64, 1, 4, 2)
    assert not fits(pair, config) and config not in configurations(pair)
    with pytest.raises(StofError, match="does not hold 128 columns"):
        source(pair, config)


@pytest.mark.parametrize("hidden", range(8, 129, 8))
def test_every_size_has_a_configuration_for_many_and_for_few_rows(hidden: int) -> None:
    pair = GemmPair(768, hidden, 768, "fp16")
    for rows in (1, 128, 4096, 32768):
        assert set(ranked(pair, rows)) == set(configurations(pair))
    assert ranked(pair, 32768)[0].rows >= 64 and ranked(pair, 16)[0].rows <= 32
    with pytest.raises(StofError, match="no time"):
        estimate_us(pair, PairConfig(64, 64, 64, 2, 4, 3), 128)


# Microseconds on an H200 (benchmarks/gemm_pair.py, cuda/NOTES_fused.md): the best variant, and two regions.
MEASURED = {
    (32768, 768, 16): (46.8, 54.5),
    (32768, 768, 128): (53.9, 54.4),
    (32768, 2048, 64): (125.8, 111.9),
    (4096, 768, 16): (11.4, 19.1),
    (4096, 768, 64): (13.7, 19.0),
    (4096, 2048, 128): (34.8, 25.6),
    (1024, 768, 64): (9.5, 10.9),
    (128, 768, 16): (3.3, 8.6),
    (128, 768, 64): (4.3, 8.7),
    (128, 768, 128): (6.0, 8.9),
    (128, 2048, 128): (17.7, 10.5),
}


@pytest.mark.parametrize("sizes", MEASURED)
def test_estimates_are_near_what_was_measured(sizes: tuple[int, int, int]) -> None:
    """Near enough to rank, to be tried at few rows, and to leave products alone where two kernels are far faster."""
    rows, width, hidden = sizes
    pair = GemmPair(width, hidden, width, "fp16", "relu", "none", True, True, True)
    guess = estimate_us(pair, ranked(pair, rows)[0], rows)
    best, two = MEASURED[sizes]
    assert 0.75 * best < guess < 1.25 * best
    separate = [
        min(gemm.estimate_us("gemm_epilogue", name, rows, n, k) for name in gemm.configs("gemm_epilogue"))
        for n, k in ((hidden, width), (width, hidden))
    ]
    assert rows > 128 or width > 768 or guess < sum(separate)
    assert best < 1.3 * two or guess > sum(separate)


@needs_triton
def test_a_compiled_pair_says_how_it_is_launched(tmp_path: Path) -> None:
    pair = GemmPair(768, 64, 200, "bf16", inner_bias=True, residual=True)
    config = configurations(pair)[-1]
    program = compile_program(pair, config, (80, 90), rank=3, cache=KernelCache(tmp_path))
    assert program.archs == (80, 90)
    for images in program.kernels:
        assert all(image.threads == 32 * config.warps and image.shared <= 99 << 10 for image in images)
    shapes = [(5, 70, 768), (768, 64), (64, 200), (64,), (5, 70, 200)]
    assert [t.dtype for t in (*program.inputs, *program.outputs)] == ["bf16"] * 6
    for tensor, shape in zip(program.inputs, shapes, strict=True):
        known = [(dim.evaluate(shapes), size) for dim, size in zip(tensor.dims, shape, strict=True) if dim is not None]
        assert all(a == b for a, b in known)
    assert [dim is None for dim in program.inputs[0].dims] == [True, True, False]
    assert tuple(dim.evaluate(shapes) for dim in program.outputs[0].dims if dim is not None) == (5, 70, 200)
    launch = program.launches[0]
    assert [axis.evaluate(shapes) for axis in launch.grid] == [-(-350 // config.rows) * config.parts, 1, 1]
    assert launch.args[-1].value.evaluate(shapes) == 350  # type: ignore[union-attr]
