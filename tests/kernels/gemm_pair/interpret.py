"""Answers requests of tests.kernels.interpreted for pairs of GEMMs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from stof_onnx.kernels.gemm_pair import GemmPair, PairConfig
from stof_onnx.kernels.gemm_pair.source import KERNEL, grid_blocks, source

from tests.kernels.gemm_pair.cases import error_ratio, inputs
from tests.kernels.interpreted import answer, loaded


def run(pair: GemmPair, config: PairConfig, arrays: dict[str, np.ndarray], rows: int, folder: Path) -> np.ndarray:
    """The output as float32, from torch tensors on the CPU."""
    import torch

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[pair.dtype]
    kernel = loaded(source(pair, config), KERNEL, folder)
    given = [torch.from_numpy(array).to(dtype) for array in arrays.values()]
    out = torch.full((rows, pair.width), float("nan"), dtype=dtype)
    kernel[(grid_blocks(config, rows),)](*given, out, rows)
    return out.float().numpy()


def ratio(text: str, name: str, rows: int, seed: int, folder: Path) -> float:
    pair = GemmPair.from_json(text)
    arrays = inputs(pair, rows, np.random.default_rng(seed))
    return error_ratio(pair, arrays, run(pair, PairConfig.parse(name), arrays, rows, folder))


if __name__ == "__main__":
    answer(ratio)
