"""Two kinds of constants are evaluated when a model is lowered, by ONNX Runtime.

Masks of attentions that stay operators become dense initializers: TensorRT has no operators to decode them. Cosines and
sines of constant positions (rotary embeddings) become tables: TensorRT 8.6 would compile what they are made from.
Nothing else of the model is folded: quantized weights, for instance, have to keep their DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from stof_onnx.errors import StofError
from stof_onnx.graph.fold_small import RANDOM
from stof_onnx.graph.proto_graph import ProtoGraph, read_names, subgraphs

_QUIET = 4  # ONNX Runtime reports by exceptions
_WAVES = frozenset({"Cos", "Sin"})
_GROWING = frozenset({"Expand", "Tile"})  # they repeat what is better stored once


def fold_dense_masks(model: onnx.ModelProto, arrays: Iterable[str]) -> int:
    """Evaluates what depends on the initializers `arrays` and constants only; returns how many tensors became dense.

    Args:
        model: without functions, its weights loaded; changed in place.

    Raises:
        StofError: ONNX Runtime can not evaluate them.
    """
    return _fold(model, set(arrays))


def fold_position_tables(model: onnx.ModelProto) -> int:
    """Evaluates cosines and sines of constants and what is computed from them and constants only, but not what repeats
    them; returns how many tensors became tables. What ONNX Runtime can not evaluate stays as it is."""
    try:
        return _fold(model, set(), _WAVES, _GROWING)
    except StofError:  # a type that ONNX Runtime has no such kernel for: they stay operators
        return 0


def _fold(
    model: onnx.ModelProto,
    derived: set[str],
    begin: frozenset[str] = frozenset(),
    kept: frozenset[str] = frozenset(),
) -> int:
    """Folds the nodes that read constants only, at least one of them `derived` or the node of a type in `begin`; what
    they make is derived in turn. Nodes of a type in `kept` stay."""
    graph = ProtoGraph(model.graph)
    constant = set(graph.initializers)
    folded: list[onnx.NodeProto] = []
    rest: list[onnx.NodeProto] = []
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        known = _foldable(node) and constant.issuperset(inputs) and bool(inputs)
        if known or (node.op_type == "Constant" and not node.domain):
            constant.update(node.output)
        if known and node.op_type not in kept and (node.op_type in begin or not derived.isdisjoint(inputs)):
            derived.update(node.output)
            folded.append(node)
        else:
            rest.append(node)
    made = {name for node in folded for name in node.output if name}
    wanted = {name for node in rest for name in read_names(node)} | {o.name for o in model.graph.output}
    outputs = sorted(made & wanted)
    if not outputs:
        return 0
    values = _evaluate(model, graph, outputs)
    graph.replace_nodes(rest)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in zip(outputs, values, strict=True)
    )
    return len(outputs)


def _foldable(node: onnx.NodeProto) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type not in RANDOM and not any(subgraphs(node))


def _evaluate(model: onnx.ModelProto, graph: ProtoGraph, outputs: list[str]) -> list[np.ndarray]:
    needed = set(outputs)
    nodes = []
    for node in reversed(model.graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(name for name in node.input if name)
            nodes.append(node)
    part = helper.make_graph(
        nodes[::-1],
        "constants",
        [],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [tensor for name, tensor in graph.initializers.items() if name in needed],
    )
    single = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    try:
        session = ort.InferenceSession(single.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(outputs, {}))
    except Exception as error:  # ONNX Runtime raises one pybind class for each status
        raise StofError(f"constants can not be evaluated ({error})", "lowering") from error
