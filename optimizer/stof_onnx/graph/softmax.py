"""Puts a Softmax back together that the opset conversion took apart for want of a rank.

Before opset 13 Softmax worked on the input flattened at `axis`. Where the converter does not see that this is the last
axis, it writes Shape, Flatten, Softmax and Reshape. Ranks are known here once the input shapes are.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from stof_onnx.graph.fold import Folder
from stof_onnx.graph.model import LoadedModel
from stof_onnx.graph.opset import FIRST_PLAIN_SOFTMAX
from stof_onnx.graph.scenarios import build_family


def rejoin_softmax(model: LoadedModel) -> None:
    """Edits `model.graph`: Reshape(Softmax(Flatten(x, axis)), Shape(x)) becomes Softmax(x) where `axis` is the last."""
    if model.source_opset >= FIRST_PLAIN_SOFTMAX:
        return
    folder = build_family(model).main
    for graph in [model.graph, *model.graph.subgraphs(recursive=True)]:
        for node in [n for n in graph.nodes if n.op == "Softmax"]:
            _rejoin(graph, node, folder)


def _rejoin(graph: gs.Graph, softmax: gs.Node, folder: Folder) -> None:
    flatten = _only(softmax.inputs[0].inputs, "Flatten")
    reshape = _only(softmax.outputs[0].outputs, "Reshape")
    if flatten is None or reshape is None:
        return
    source = flatten.inputs[0]
    shape = _only(reshape.inputs[1].inputs, "Shape")
    if shape is None or shape.inputs[0] is not source or shape.attrs:
        return
    known = folder.shape(source)
    if known is None or flatten.attrs.get("axis", 1) != len(known) - 1:
        return
    output = reshape.outputs[0]
    reshape.outputs.clear()
    softmax.inputs[0] = source
    softmax.outputs[0] = output
    softmax.attrs["axis"] = -1
    dead = [n for n in (reshape, flatten, shape) if not any(t.outputs for t in n.outputs)]
    for node in dead:
        node.inputs.clear()
    graph.nodes = [n for n in graph.nodes if all(n is not d for d in dead)]


def _only(nodes: list[gs.Node], op: str) -> gs.Node | None:
    return nodes[0] if len(nodes) == 1 and nodes[0].op == op else None
