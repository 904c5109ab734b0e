"""The generated kernels, run by Triton's interpreter on the CPU, against float64."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from stof_onnx.errors import StofError
from stof_onnx.kernels.triton_rows import RowBuilder, RowConfig, RowProgram, configurations, norm_program
from stof_onnx.kernels.triton_rows.library import standard_programs
from stof_onnx.kernels.triton_rows.source import grid_blocks, source

from tests.kernels import interpreted
from tests.kernels.triton_rows.programs import DTYPES, named, random_program

# The interpreter cuts fp32 to bf16 off instead of rounding it: twice the error.
WORST = {"fp16": 1.0, "bf16": 2.0, "fp32": 1.0}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[subprocess.Popen[str]]:
    with interpreted.interpreter("tests.kernels.triton_rows.interpret") as process:
        yield process


def check(interpreter: subprocess.Popen[str], program: RowProgram, config: RowConfig, rows: int, seed: int) -> None:
    line = interpreted.ask(interpreter, program.to_json(), config.name, rows, seed)
    assert line, f"the interpreter failed with {config.name}: {program.to_json()}"
    worst = max(WORST[out.dtype] for out in program.outputs)
    assert float(line) <= worst, f"{line} with {config.name}: {program.to_json()}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 48, 100, 768])
def test_every_program(interpreter: subprocess.Popen[str], cols: int, dtype: str) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    for program in named(cols, dtype).values():
        check(interpreter, program, configurations(program)[0], 5, seed)


def test_every_configuration(interpreter: subprocess.Popen[str]) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    for name in ("add_layer_norm_sum", "bias_gelu_erf", "mixed"):
        program = named(1000, "fp16")[name]
        for config in configurations(program):
            check(interpreter, program, config, 3, seed)


def test_random_programs(interpreter: subprocess.Popen[str]) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(40):
        program = random_program(rng)
        configs = configurations(program)
        check(interpreter, program, configs[int(rng.integers(0, len(configs)))], 5, seed)


@pytest.mark.parametrize("cols", [1, 64, 100, 768, 1024, 3072, 4096, 11008, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_configurations_fit(cols: int, dtype: str) -> None:
    for program in standard_programs(cols, dtype).values():
        configs = configurations(program)
        assert configs and len(set(configs)) == len(configs)
        for config in configs:
            assert RowConfig.parse(config.name) == config
            assert config.rows * config.block >= config.warps or cols == 1
            assert source(program, config) == source(program, config)
            assert grid_blocks(program, config, 0) == 0


def test_rows_that_no_kernel_holds_are_refused() -> None:
    with pytest.raises(StofError, match="too long"):
        configurations(norm_program("layer_norm", 1 << 16, "fp32", add=False))


@pytest.mark.parametrize(
    "config", [RowConfig(100, 1, 4), RowConfig(256, 3, 4), RowConfig(256, 1, 0), RowConfig(8, 1, 1)]
)
def test_configurations_that_do_not_fit_are_refused(config: RowConfig) -> None:
    with pytest.raises(StofError, match="configuration"):
        source(norm_program("layer_norm", 1 << 15, "fp16", add=False), config)


@pytest.mark.parametrize("name", ["", "b256", "b256r4", "256r4w4", "b-1r4w4", "b256r4w4x"])
def test_names_of_no_configuration_are_refused(name: str) -> None:
    with pytest.raises(StofError, match="no configuration"):
        RowConfig.parse(name)


@pytest.mark.parametrize("divisor", [3.0, -1e-4, 1e-35, 1e35])
def test_divisions(interpreter: subprocess.Popen[str], divisor: float) -> None:
    """By a constant and by a column, which become products, and by what varies over columns."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    b = RowBuilder(100)
    x, vector, column = b.rows("fp32"), b.vector("fp32"), b.column("fp32")
    away = b.add(b.op("abs", column), b.constant(0.5))
    b.output(b.mul(b.div(x, b.constant(divisor)), b.constant(divisor)), "fp32")
    b.output(b.div(b.div(x, away), b.constant(2.0)), "fp32")
    b.output(b.div(away, b.add(b.op("abs", vector), b.constant(0.5))), "fp32")
    b.output(b.div(b.constant(1.0), away), "fp32")
    program = b.build()
    check(interpreter, program, configurations(program)[0], 5, seed)
