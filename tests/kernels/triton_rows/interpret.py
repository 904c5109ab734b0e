"""Answers requests of tests.kernels.interpreted for row programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from stof_onnx.kernels.triton_rows import RowConfig, RowProgram, reference
from stof_onnx.kernels.triton_rows.source import KERNEL, grid_blocks, source

from tests.kernels.interpreted import answer, loaded
from tests.kernels.triton_rows.programs import error_ratio, inputs


def run(program: RowProgram, config: RowConfig, arrays: list[np.ndarray], rows: int, folder: Path) -> list[np.ndarray]:
    """The outputs as float32, from torch tensors on the CPU."""
    import torch

    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    kernel = loaded(source(program, config), KERNEL, folder)
    kinds = program.kinds
    given = [torch.from_numpy(a).to(types[t.dtype]) for a, t in zip(arrays, program.inputs, strict=True)]
    found = [
        torch.full((rows, program.cols if kinds[out.value].per_col else 1), float("nan"), dtype=types[out.dtype])
        for out in program.outputs
    ]
    kernel[(grid_blocks(program, config, rows),)](*given, *found, rows)
    return [tensor.float().numpy() for tensor in found]


def ratio(text: str, name: str, rows: int, seed: int, folder: Path) -> float:
    program = RowProgram.from_json(text)
    arrays = inputs(program, rows, np.random.default_rng(seed))
    found = run(program, RowConfig.parse(name), arrays, rows, folder)
    return error_ratio(program, found, reference(program, arrays))


if __name__ == "__main__":
    answer(ratio)
