"""Has TensorRT 8.6 compile the operators between two attentions as one node.

TensorRT 8.6 hands what lies between two plugins to its graph compiler, as one node, where a normalization layer is
among it; seen with BERT, GPT-2 and ViT. RMSNorm is written in elementwise operators, and a run that has no other norm
becomes single layers, each tuned in every format: a LLaMA of two layers was not built after minutes. So one
normalization that changes nothing is put into such a run: LayerNormalization of rows of one element is zero, and is
added to the factor that scales the rows. LLaMA was built in 23 s then, T5 in 8 s, one node between two attentions.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from stof_onnx.graph.proto_graph import ProtoGraph, attributes_of
from stof_onnx.trt.plugin_nodes import is_plugin
from stof_onnx.trt.region_nodes import is_region_plugin

_NORM = "LayerNormalization"
_OF_ONE = frozenset({"Add", "Div", "Mul", "Pow", "Reciprocal", "Sqrt"})
_LEAST_OPSET = 17  # of LayerNormalization
_VECTORS = {"one": 1, "zero": 0}  # its scale and shift


def mark_runs(model: onnx.ModelProto) -> int:
    """Puts the normalization into each run of the lowered `model` that has a mean of rows but no normalization, in
    place; returns how many runs that were."""
    if not any(o.domain in ("", "ai.onnx") and o.version >= _LEAST_OPSET for o in model.opset_import):
        return 0
    graph = ProtoGraph(model.graph)
    nodes = list(model.graph.node)
    runs = _runs(nodes)
    done = {run for node, run in zip(nodes, runs, strict=True) if node.op_type == _NORM}
    factors: dict[str, np.dtype] = {}
    for node, run in zip(nodes, runs, strict=True):
        if run not in done and _is_mean_of_rows(graph, node) and (found := _factor(graph, nodes, node.output[0])):
            factors[found[0]] = found[1]
            done.add(run)
    if not factors:
        return 0
    vectors = {
        dtype: [graph.add_constant(f"stof/{name}", np.full(1, value, dtype)) for name, value in _VECTORS.items()]
        for dtype in set(factors.values())
    }
    written: list[onnx.NodeProto] = []
    renamed: dict[str, str] = {}
    for node in nodes:
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)
        written.append(node)
        for name in factors.keys() & set(node.output):
            zero, renamed[name] = graph.fresh(f"{name}/zero"), graph.fresh(f"{name}/same")
            written.append(helper.make_node(_NORM, [name, *vectors[factors[name]]], [zero], name=zero, axis=-1))
            written.append(helper.make_node("Add", [name, zero], [renamed[name]], name=renamed[name]))
    graph.replace_nodes(written)
    return len(factors)


def _runs(nodes: list[onnx.NodeProto]) -> list[int]:
    """How many plugins lie before each node, on the path with most."""
    depth: dict[str, int] = {}
    found = []
    for node in nodes:
        run = max((depth.get(name, 0) for name in node.input), default=0)
        found.append(run)
        after = run + (is_plugin(node) or is_region_plugin(node))
        depth.update((name, after) for name in node.output)
    return found


def _is_mean_of_rows(graph: ProtoGraph, node: onnx.NodeProto) -> bool:
    if node.op_type != "ReduceMean":
        return False
    attributes = attributes_of(node)
    axes = graph.constant(node.input[1]) if len(node.input) > 1 else np.array(attributes.get("axes", ()))
    return axes is not None and axes.tolist() == [-1] and attributes.get("keepdims", 1) == 1


def _factor(graph: ProtoGraph, nodes: list[onnx.NodeProto], mean: str) -> tuple[str, np.dtype] | None:
    """The last of the numbers a row that are computed from the mean alone, 1 / sqrt(mean + epsilon), and its type, that
    of epsilon. None where there is none: the mean itself may be too large for float16."""
    name, dtype = mean, None
    while graph.readers(name) == 1:
        reader = next((node for node in nodes if name in node.input), None)  # else a graph output, or in a subgraph
        others = [graph.constant(other) for other in reader.input if other != name] if reader else [None]
        if reader is None or reader.op_type not in _OF_ONE or any(o is None or o.size > 1 for o in others):
            break
        name = reader.output[0]
        if reader.op_type != "Pow":  # whose exponent may be of another type
            dtype = next((o.dtype for o in others if o is not None), dtype)
    if name == mean or dtype is None or any(output.name == name for output in graph.graph.output):
        return None
    return name, dtype
