"""Evaluates the shape arithmetic of fixed sizes, which ONNX's inference leaves open (Where, Equal, ConstantOfShape...).

Exporters that trace with dynamic axes leave such nodes behind when the axes are fixed later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from stof_onnx.graph.proto_graph import constant_value, subgraphs

_SMALL = 64  # elements: shapes, axes, and what they are computed from
RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)

Dims = tuple[int | str | None, ...]


def fold_small(model: onnx.ModelProto, dims: Mapping[str, Dims], most: int = _SMALL) -> int:
    """Replaces nodes of the main graph whose outputs are small and known by initializers, in place.

    Args:
        dims: inferred shapes: Shape of a tensor with fixed ones is known.
        most: elements that integer and boolean outputs may have; others are small ones in any case.

    Returns:
        How many nodes were replaced.
    """
    graph = model.graph
    inputs = {value.name for value in graph.input}  # a caller may override an initializer that is one
    stored = (t for t in graph.initializer if math.prod(t.dims) <= most and t.data_location != t.EXTERNAL)
    known = {t.name: numpy_helper.to_array(t) for t in stored if t.name not in inputs}
    kept, folded = [], 0
    for node in graph.node:
        values = _value_of(node, known, dims, model.opset_import, most)
        if values is None:
            kept.append(node)
            continue
        known |= values
        if node.op_type == "Constant":
            kept.append(node)
            continue
        folded += 1
        graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    if folded:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
        del graph.node[:]
        graph.node.extend(copies)
    return folded


def _value_of(
    node: onnx.NodeProto,
    known: Mapping[str, np.ndarray],
    dims: Mapping[str, Dims],
    opsets: Sequence[onnx.OperatorSetIdProto],
    most: int,
) -> dict[str, np.ndarray] | None:
    if node.domain not in ("", "ai.onnx") or any(subgraphs(node)) or node.op_type in RANDOM:
        return None
    if node.op_type == "Constant":
        value = constant_value(node)
        return {node.output[0]: value} if value is not None and value.size <= most else None
    inputs = [name for name in node.input if name]
    if node.op_type == "Shape":
        sizes = dims.get(inputs[0])
        if sizes is None or not all(isinstance(size, int) and size >= 0 for size in sizes):
            return None
        fields = {a.name: a.i for a in node.attribute}
        return {node.output[0]: np.array(sizes, np.int64)[fields.get("start", 0) : fields.get("end")]}
    if not inputs or any(name not in known for name in inputs):
        return None
    if not all(_is_small(dims.get(name), most) for name in node.output if name):
        return None
    given = [numpy_helper.from_array(known[name], name) for name in dict.fromkeys(inputs)]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "node", [], outputs, given)
    try:
        results = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets)).run(None, {})
    except Exception:  # what can not be evaluated stays a node
        return None
    values = {output.name: np.asarray(value) for output, value in zip(outputs, results, strict=True)}
    return values if all(v.size <= _SMALL or v.dtype.kind in "ib" for v in values.values()) else None


def _is_small(sizes: Dims | None, most: int) -> bool:
    return sizes is not None and all(isinstance(s, int) for s in sizes) and math.prod(sizes) <= most  # type: ignore[arg-type]
