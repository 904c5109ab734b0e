"""The same model in higher precision: float16 and bfloat16 become float32; a float32 model becomes float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from stof_onnx.graph.external import read_tensor
from stof_onnx.graph.walk import all_graphs, all_nodes, node_graphs

_BFLOAT16: dict[int, int] = {TensorProto.BFLOAT16: TensorProto.FLOAT}
_HALF: dict[int, int] = {TensorProto.FLOAT16: TensorProto.FLOAT, TensorProto.BFLOAT16: TensorProto.FLOAT}
_SINGLE: dict[int, int] = {TensorProto.FLOAT: TensorProto.DOUBLE}
_TYPE_ATTRIBUTES = {"to", "dtype", "stash_type", "softmax_precision", "output_dtype"}


def uses_bfloat16(proto: onnx.ModelProto) -> bool:
    """True when a weight, input or output of the model is bfloat16."""
    return _uses(proto, set(_BFLOAT16))


def without_bfloat16(proto: onnx.ModelProto, base_dir: Path) -> onnx.ModelProto:
    """A copy of `proto` that computes in float32 what it computed in bfloat16, with all weights inside."""
    return _convert(proto, base_dir, _BFLOAT16)


def upcast(proto: onnx.ModelProto, base_dir: Path, without: frozenset[str] = frozenset()) -> onnx.ModelProto:
    """A copy of `proto` with all weights inside, one precision up.

    Args:
        without: operator types that the runtime lacks in float64: they stay float32 between two casts.
    """
    mapping = _HALF if _uses(proto, set(_HALF)) else _SINGLE
    out = _convert(proto, base_dir, mapping)
    if without and mapping is _SINGLE:
        _wrap(out.graph, without)
        for function in out.functions:
            _wrap(function, without)
    return out


def _convert(proto: onnx.ModelProto, base_dir: Path, mapping: dict[int, int]) -> onnx.ModelProto:
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    for graph in all_graphs(out.graph):
        _graph(graph, mapping, base_dir)
    for function in out.functions:
        for node in all_nodes(function.node):
            _attributes(node, mapping, base_dir)
        for inner in (g for node in function.node for h in node_graphs(node) for g in all_graphs(h)):
            _graph(inner, mapping, base_dir)
    return out


def _uses(proto: onnx.ModelProto, types: set[int]) -> bool:
    for graph in all_graphs(proto.graph):
        values = [*graph.input, *graph.output]
        if any(t.data_type in types for t in graph.initializer):
            return True
        if any(v.type.tensor_type.elem_type in types for v in values):
            return True
    return False


def _graph(graph: onnx.GraphProto, mapping: dict[int, int], base_dir: Path) -> None:
    del graph.value_info[:]
    for value_info in [*graph.input, *graph.output]:
        tensor_type = value_info.type.tensor_type
        if tensor_type.elem_type in mapping:
            tensor_type.elem_type = mapping[tensor_type.elem_type]
    for tensor in graph.initializer:
        _tensor(tensor, mapping, base_dir)
    for node in graph.node:
        _attributes(node, mapping, base_dir)


def _attributes(node: onnx.NodeProto, mapping: dict[int, int], base_dir: Path) -> None:
    for attribute in node.attribute:
        if attribute.name in _TYPE_ATTRIBUTES and attribute.type == onnx.AttributeProto.INT:
            attribute.i = mapping.get(attribute.i, attribute.i)
        if attribute.HasField("t"):
            _tensor(attribute.t, mapping, base_dir)
    if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
        for attribute in node.attribute:
            if attribute.name in ("value_float", "value_floats") and TensorProto.FLOAT in mapping:
                values = np.array(
                    attribute.f if attribute.name == "value_float" else list(attribute.floats), np.float64
                )
                attribute.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(values)))
    elif node.op_type == "ConstantOfShape" and not node.attribute and TensorProto.FLOAT in mapping:
        zero = onnx.numpy_helper.from_array(np.zeros(1, np.float64))
        node.attribute.append(onnx.helper.make_attribute("value", zero))


def _tensor(tensor: TensorProto, mapping: dict[int, int], base_dir: Path) -> None:
    if tensor.data_type in mapping:
        values = read_tensor(tensor, base_dir).astype(onnx.helper.tensor_dtype_to_np_dtype(mapping[tensor.data_type]))
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    elif tensor.data_location == TensorProto.EXTERNAL:
        tensor.CopyFrom(onnx.numpy_helper.from_array(read_tensor(tensor, base_dir), tensor.name))


def _wrap(holder: onnx.GraphProto | onnx.FunctionProto, types: frozenset[str]) -> None:
    """Puts casts around the listed operators (their tensors must all be floating point)."""
    nodes: list[onnx.NodeProto] = []
    for node in holder.node:
        for inner in node_graphs(node):
            _wrap(inner, types)
        if node.op_type not in types:
            nodes.append(node)
            continue
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        for i, name in enumerate(node.input):
            if name:
                copy.input[i] = f"{name}__as_float32_{len(nodes)}"
                nodes.append(onnx.helper.make_node("Cast", [name], [copy.input[i]], to=TensorProto.FLOAT))
        casts = []
        for i, name in enumerate(node.output):
            if name:
                copy.output[i] = f"{name}__as_float32"
                casts.append(onnx.helper.make_node("Cast", [copy.output[i]], [name], to=TensorProto.DOUBLE))
        nodes += [copy, *casts]
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del holder.node[:]
    holder.node.extend(kept)


def upcast_feeds(feeds: dict[str, np.ndarray], dtypes: Callable[[str], int]) -> dict[str, np.ndarray]:
    """Inputs in the types that the upcast model takes; `dtypes` gives the element type of each of its inputs."""
    return {n: v.astype(onnx.helper.tensor_dtype_to_np_dtype(dtypes(n)), copy=False) for n, v in feeds.items()}
