"""From the softmax down to probabilities @ V.

Contract: between the softmax and the product there are only nodes that leave the probabilities as they are (Cast,
Identity, Dropout, reshapes of leading axes), turn NaN into 0, or set rows to 0 that an added term hides; nothing else
reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.movement import drops, is_standard
from stof_onnx.attention.products import Product, is_product, read_product
from stof_onnx.attention.readers import readers
from stof_onnx.attention.scores import Stop

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder

_RESHAPES = {"Reshape", "Unsqueeze", "Squeeze"}


@dataclass(frozen=True)
class Values:
    """The product with V, the nodes from the softmax (excluded) to it (included), the tensors between them."""

    product: Product
    nodes: tuple[gs.Node, ...]
    tensors: tuple[gs.Tensor, ...]
    nan_guard: bool  # NaN becomes 0
    row_guard: gs.Tensor | None  # rows in which this added term is -inf everywhere become 0


def read_values(softmax: gs.Node, graph_outputs: set[int], folder: Folder) -> Values | Stop:
    """Walks down from the softmax. `graph_outputs` are ids of tensors that leave their graph."""
    tensor = softmax.outputs[0]
    shape = folder.shape(tensor)
    nodes: list[gs.Node] = []
    tensors: list[gs.Tensor] = []
    guard = False
    row_guard: gs.Tensor | None = None
    while True:
        if id(tensor) in graph_outputs:
            return Stop("the probabilities are an output of the graph", tensor.inputs[0])
        data, _ = readers(tensor)
        guarded = _nan_guard(tensor, folder)
        if guarded is not None:
            nodes += guarded
            tensors += [tensor, guarded[0].outputs[0]]
            tensor, guard = guarded[-1].outputs[0], True
            continue
        zeroed = _row_guard(tensor, data, folder)
        if zeroed is not None and row_guard is None:
            node, row_guard = zeroed
            nodes.append(node)
            tensors.append(tensor)
            tensor = node.outputs[0]
            continue
        if len(data) != 1:
            return Stop("the probabilities have another consumer", data[1] if len(data) > 1 else softmax)
        node = data[0]
        tensors.append(tensor)
        nodes.append(node)
        if is_product(node):
            break
        if not is_standard(node):
            return Stop(f"{node.domain}::{node.op} between the softmax and the values", node)
        if node.op == "Dropout" and drops(node, folder):
            return Stop("Dropout in training mode", node)
        if node.op in ("Cast", "Identity", "Dropout"):
            tensor = node.outputs[0]
        elif node.op in _RESHAPES:
            after = folder.shape(node.outputs[0])
            if shape is None or after is None or after[-2:] != shape[-2:] or np.prod(after) != np.prod(shape):
                return Stop(f"{node.op} moves the query or key axis of the probabilities", node)
            tensor = node.outputs[0]
        else:
            return Stop(f"{node.op} between the softmax and the values", node)
    if node.inputs[0] is not tensor or node.inputs[1] is tensor:
        return Stop("the probabilities are not the left operand of the product with V", node)
    product = read_product(node, folder)
    if product is None:
        return Stop(f"{node.op} is not one matrix product with known sizes", node)
    if product.left_letters[-2:] != product.m + product.c:
        return Stop(f"{node.op} does not sum over the keys", node)
    if isinstance(product.right, gs.Constant):
        return Stop("the values are a constant", node)
    return Values(product, tuple(nodes), tuple(tensors), guard, row_guard)


def reaches_product(softmax: gs.Node, limit: int = 12) -> bool:
    """True when some product lies a few nodes below the softmax with its result as left operand."""
    frontier, seen = [softmax.outputs[0]], 0
    while frontier and seen < limit:
        tensor = frontier.pop(0)
        for node in tensor.outputs:
            seen += 1
            if is_product(node):
                if not isinstance(node.inputs[1], gs.Constant):
                    return True
            elif node.op in {"Cast", "Identity", "Dropout", "Where", "Mul", "Transpose", "Slice", *_RESHAPES}:
                frontier.append(node.outputs[0])
    return False


def _nan_guard(tensor: gs.Tensor, folder: Folder) -> list[gs.Node] | None:
    """[IsNaN, Where] when the readers of `tensor` are exactly Where(IsNaN(tensor), 0, tensor)."""
    data, _ = readers(tensor)
    tests = [n for n in data if n.op == "IsNaN" and is_standard(n)]
    choices = [n for n in data if n.op == "Where" and is_standard(n)]
    if len(data) != 2 or len(tests) != 1 or len(choices) != 1:
        return None
    test, choice = tests[0], choices[0]
    flag = test.outputs[0]
    if len(flag.outputs) != 1 or choice.inputs[0] is not flag or choice.inputs[2] is not tensor:
        return None
    return [test, choice] if folder.scalar(choice.inputs[1]) == 0 else None


def _row_guard(tensor: gs.Tensor, data: list[gs.Node], folder: Folder) -> tuple[gs.Node, gs.Tensor] | None:
    """Where(ReduceMax(term over keys) == -inf, 0, tensor), as ONNX defines Attention: the Where and the term."""
    if len(data) != 1 or data[0].op != "Where" or not is_standard(data[0]):
        return None
    condition, zero, kept = data[0].inputs
    if kept is not tensor or folder.scalar(zero) != 0 or not condition.inputs or condition.inputs[0].op != "Equal":
        return None
    for largest, lowest in (condition.inputs[0].inputs, reversed(condition.inputs[0].inputs)):
        if folder.scalar(lowest) != -np.inf or not largest.inputs or largest.inputs[0].op != "ReduceMax":
            continue
        node = largest.inputs[0]
        before, after = folder.shape(node.inputs[0]), folder.shape(largest)
        if before is not None and after == (*before[:-1], 1) and before[-1] > 1:
            return data[0], node.inputs[0]
    return None
