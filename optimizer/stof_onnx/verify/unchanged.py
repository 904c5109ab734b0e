"""What a comparison of attentions alone leaves out: whether everything else is the same in two models."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx

from stof_onnx.attention.anchors import OWN_DOMAIN
from stof_onnx.graph.external import is_external, read_tensor
from stof_onnx.graph.walk import used_names
from stof_onnx.verify.compare import Side

_FACTORS = 3  # Q, K and V; what else an attention reads is part of its comparison


def first_change(original: Side, optimized: Side, compared: Collection[str]) -> str:
    """What is in `optimized` and not in `original`, and does not end in attentions whose outputs are `compared`.

    Weights are read one at a time. Returns "" for nothing.
    """
    nodes = {_bytes_of(node) for node in original.proto.graph.node}
    read = {output.name for output in optimized.proto.graph.output}  # by what was not compared
    compared = set(compared)
    for node in reversed(optimized.proto.graph.node):
        if node.domain == OWN_DOMAIN and not read.isdisjoint(node.output) and compared.issuperset(node.output):
            read.update(node.input[:_FACTORS])
        elif node.domain != OWN_DOMAIN and _bytes_of(node) in nodes:
            read |= used_names([node])
        elif node.op_type == "Reshape" and compared.issuperset(node.output):  # an attention's output to [B * S, H * D]
            compared.add(node.input[0])
            read.add(node.input[0])
        elif not read.isdisjoint(node.output):
            return f"the node '{node.name or node.output[0]}' ({node.op_type})"
    functions = {_bytes_of(function) for function in original.proto.functions}
    for function in optimized.proto.functions:
        if function.domain != OWN_DOMAIN and _bytes_of(function) not in functions:
            return f"the function '{function.name}'"
    weights = {tensor.name: tensor for tensor in original.proto.graph.initializer}
    for tensor in optimized.proto.graph.initializer:
        twin = weights.get(tensor.name)
        if tensor.name in read and (twin is None or not _equal(twin, original.base_dir, tensor, optimized.base_dir)):
            return f"the weight '{tensor.name}'"
    return ""


def _equal(a: onnx.TensorProto, a_dir: Path, b: onnx.TensorProto, b_dir: Path) -> bool:
    if a.data_type != b.data_type or list(a.dims) != list(b.dims):
        return False
    if not is_external(a) and not is_external(b) and _bytes_of(a) == _bytes_of(b):
        return True
    return read_tensor(a, a_dir).tobytes() == read_tensor(b, b_dir).tobytes()


def _bytes_of(message: onnx.NodeProto | onnx.FunctionProto | onnx.TensorProto) -> bytes:
    return message.SerializeToString(deterministic=True)
