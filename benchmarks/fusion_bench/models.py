"""Blocks of optimized models."""

from __future__ import annotations

from pathlib import Path

import onnx
from stof_onnx.fusion.sequence import Block, find_blocks
from stof_onnx.fusion.tensors import Tensors


def model_blocks(path: Path) -> list[Block]:
    """The blocks of an optimized model whose inputs have fixed sizes, in order."""
    model = onnx.load(str(path), load_external_data=False)
    sizes = {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.input}
    return find_blocks(Tensors(model, model.graph.initializer, sizes, path.parent))
