"""Masks of attentions that stay operators become dense initializers: TensorRT has no operators to decode them.

After inlining, whatever is computed from the mask arrays and other constants alone is evaluated by ONNX Runtime.
Nothing else of the model is folded: quantized weights, for instance, have to keep their DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from stof_onnx.errors import StofError
from stof_onnx.graph.proto_graph import ProtoGraph, read_names, subgraphs

_QUIET = 4  # ONNX Runtime reports by exceptions


def fold_dense_masks(model: onnx.ModelProto, arrays: Iterable[str]) -> int:
    """Evaluates what depends on the initializers `arrays` and constants only; returns how many tensors became dense.

    Args:
        model: without functions, its weights loaded; changed in place.

    Raises:
        StofError: ONNX Runtime can not evaluate them.
    """
    graph = ProtoGraph(model.graph)
    derived, constant = set(arrays), set(graph.initializers)
    folded: list[onnx.NodeProto] = []
    rest: list[onnx.NodeProto] = []
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            constant.update(node.output)
            rest.append(node)
        elif _foldable(node) and constant.issuperset(inputs) and not derived.isdisjoint(inputs):
            constant.update(node.output)
            derived.update(node.output)
            folded.append(node)
        else:
            rest.append(node)
    made = {name for node in folded for name in node.output if name}
    wanted = {name for node in rest for name in read_names(node)} | {o.name for o in model.graph.output}
    outputs = sorted(made & wanted)
    if not outputs:
        return 0
    values = _evaluate(model, graph, folded, outputs)
    graph.replace_nodes(rest)
    for name, value in zip(outputs, values, strict=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return len(outputs)


def _foldable(node: onnx.NodeProto) -> bool:
    return node.domain in ("", "ai.onnx") and not any(subgraphs(node))


def _evaluate(
    model: onnx.ModelProto, graph: ProtoGraph, nodes: list[onnx.NodeProto], outputs: list[str]
) -> list[np.ndarray]:
    read = dict.fromkeys(name for node in nodes for name in node.input if name)
    made = {name for node in nodes for name in node.output}
    needed = [name for name in read if name not in made]
    part = helper.make_graph(
        [*(graph.producers[name] for name in needed if name not in graph.initializers), *nodes],
        "masks",
        [],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [graph.initializers[name] for name in needed if name in graph.initializers],
    )
    single = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    try:
        session = ort.InferenceSession(single.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(outputs, {}))
    except Exception as error:  # ONNX Runtime raises one pybind class for each status
        raise StofError(f"a mask can not be made dense ({error})", "lowering") from error
