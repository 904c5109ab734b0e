"""What is compiled ahead of time: row programs, and pairs of GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

from stof_onnx.kernels import gemm_pair
from stof_onnx.kernels.gemm import GemmDevice
from stof_onnx.kernels.gemm_pair import GemmPair, PairConfig
from stof_onnx.kernels.triton_rows import configs
from stof_onnx.kernels.triton_rows.configs import RowConfig
from stof_onnx.kernels.triton_rows.ir import RowProgram

Program = RowProgram | GemmPair
Config = RowConfig | PairConfig


def configurations(program: Program) -> Sequence[Config]:
    """Every variant worth measuring at some number of rows, the one to take unmeasured first.

    Raises:
        StofError: no variant holds rows that long.
    """
    if isinstance(program, GemmPair):
        return gemm_pair.configurations(program)
    return configs.configurations(program)


def ranked(program: Program, rows: int, device: GemmDevice) -> Sequence[Config]:
    """`configurations` by promise at this number of rows.

    Raises:
        StofError: no variant holds rows that long.
    """
    if isinstance(program, GemmPair):
        return gemm_pair.ranked(program, rows, device)
    return configs.configurations(program)


def parse_config(program: Program, name: str) -> Config:
    """The configuration of that name.

    Raises:
        StofError: there is none for such a program.
    """
    return PairConfig.parse(name) if isinstance(program, GemmPair) else RowConfig.parse(name)


def estimate_us(program: Program, config: Config, rows: int, device: GemmDevice) -> float:
    """Predicted microseconds of one launch."""
    if isinstance(program, GemmPair):
        assert isinstance(config, PairConfig)
        return gemm_pair.estimate_us(program, config, rows, device)
    return configs.estimate_us(program, rows, device.bandwidth, device.launch_us)
