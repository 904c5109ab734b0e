"""Where an attention could be: every Softmax, in the main graph, in the bodies of If, Loop and Scan, in functions."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs
from stof_onnx.attention.movement import is_standard
from stof_onnx.graph.shapes import subgraphs_of

OWN_DOMAIN = "stof"  # what an earlier run wrote is left alone


def scopes(graph: gs.Graph) -> Iterator[gs.Graph]:
    """The main graph, every body inside it, every model-local function that is not our own."""
    yield from _bodies(graph)
    for function in graph.functions:
        if function.domain != OWN_DOMAIN:
            yield from _bodies(function)


def _bodies(graph: gs.Graph) -> Iterator[gs.Graph]:
    yield graph
    for node in graph.nodes:
        for body in subgraphs_of(node).values():
            yield from _bodies(body)


def is_softmax(node: gs.Node) -> bool:
    return node.op == "Softmax" and is_standard(node)


def leaving(graph: gs.Graph) -> set[int]:
    """Ids of the tensors that are outputs of the main graph, a body or a function."""
    return {id(t) for scope in scopes(graph) for t in scope.outputs}
