"""Runs generated kernels in Triton's interpreter; a process of its own, since Triton reads the switch when imported.

Each line of stdin is a JSON list: program, configuration, rows, seed; the answer is the largest error over its bound.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from stof_onnx.kernels.triton_rows import RowConfig, RowProgram, reference
from stof_onnx.kernels.triton_rows.source import KERNEL, grid_blocks, source

from tests.kernels.triton_rows.programs import error_ratio, inputs


def run(program: RowProgram, config: RowConfig, arrays: list[np.ndarray], rows: int, folder: Path) -> list[np.ndarray]:
    """The outputs as float32, from torch tensors on the CPU."""
    import torch

    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    path = folder / f"kernel_{len(list(folder.iterdir()))}.py"
    path.write_text(source(program, config))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = program.kinds
    given = [torch.from_numpy(a).to(types[t.dtype]) for a, t in zip(arrays, program.inputs, strict=True)]
    found = [
        torch.full((rows, program.cols if kinds[out.value].per_col else 1), float("nan"), dtype=types[out.dtype])
        for out in program.outputs
    ]
    getattr(module, KERNEL)[(grid_blocks(program, config, rows),)](*given, *found, rows)
    return [tensor.float().numpy() for tensor in found]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            text, name, rows, seed = json.loads(line)
            program = RowProgram.from_json(text)
            arrays = inputs(program, rows, np.random.default_rng(seed))
            found = run(program, RowConfig.parse(name), arrays, rows, Path(folder))
            print(error_ratio(program, found, reference(program, arrays)), flush=True)


if __name__ == "__main__":
    main()
