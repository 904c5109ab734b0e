"""Kernels for memory-bound parts of a model: norms, chains of elementwise operators, reductions along rows.

`ir.py` says what such a kernel computes, `library.py` builds common ones, `reference.py` evaluates them in float64;
`configs.py` and `source.py` turn one into Triton source; `build.py`, `worker.py` and `cache.py` compile it ahead of
time, without a GPU; `compile.py` packs the result into what a plugin node carries (`kernels/cubin_program.py`).
"""

from stof_onnx.kernels.triton_rows.compile import compile_program, compile_programs
from stof_onnx.kernels.triton_rows.configs import Cost, RowConfig, cost
from stof_onnx.kernels.triton_rows.ir import Input, Kind, Op, Output, RowBuilder, RowProgram, describe
from stof_onnx.kernels.triton_rows.library import (
    ACTIVATIONS,
    activation_program,
    gelu_erf,
    gelu_tanh,
    layer_norm,
    norm_program,
    rms_norm,
    silu,
)
from stof_onnx.kernels.triton_rows.programs import Config, Program, configurations, estimate_us, parse_config, ranked
from stof_onnx.kernels.triton_rows.reference import reference

__all__ = [
    "ACTIVATIONS",
    "Config",
    "Cost",
    "Input",
    "Kind",
    "Op",
    "Output",
    "Program",
    "RowBuilder",
    "RowConfig",
    "RowProgram",
    "activation_program",
    "compile_program",
    "compile_programs",
    "configurations",
    "cost",
    "describe",
    "estimate_us",
    "gelu_erf",
    "gelu_tanh",
    "layer_norm",
    "norm_program",
    "parse_config",
    "ranked",
    "reference",
    "rms_norm",
    "silu",
]
