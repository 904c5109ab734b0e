"""Runs generated kernels in Triton's interpreter; a process of its own, since Triton reads the switch when imported.

Each line of stdin is a JSON list: pair, configuration, rows, seed; the answer is the largest error over its bound.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from stof_onnx.kernels.gemm_pair import GemmPair, PairConfig
from stof_onnx.kernels.gemm_pair.source import KERNEL, grid_blocks, source

from tests.kernels.gemm_pair.cases import error_ratio, inputs


def run(pair: GemmPair, config: PairConfig, arrays: dict[str, np.ndarray], rows: int, folder: Path) -> np.ndarray:
    """The output as float32, from torch tensors on the CPU."""
    import torch

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[pair.dtype]
    path = folder / f"kernel_{len(list(folder.iterdir()))}.py"
    path.write_text(source(pair, config))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = [torch.from_numpy(array).to(dtype) for array in arrays.values()]
    out = torch.full((rows, pair.width), float("nan"), dtype=dtype)
    getattr(module, KERNEL)[(grid_blocks(config, rows),)](*given, out, rows)
    return out.float().numpy()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            text, name, rows, seed = json.loads(line)
            pair = GemmPair.from_json(text)
            arrays = inputs(pair, rows, np.random.default_rng(seed))
            print(error_ratio(pair, arrays, run(pair, PairConfig.parse(name), arrays, rows, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
