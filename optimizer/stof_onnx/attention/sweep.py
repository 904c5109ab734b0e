"""Removes the nodes that a replacement left without a reader, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_graphsurgeon as gs


def all_graphs(root: gs.Graph) -> Iterator[gs.Graph]:
    """`root` (a main graph or a function) and every subgraph inside it."""
    yield root
    yield from root.subgraphs(recursive=True)


def sweep_dead(root: gs.Graph, start: Iterable[gs.Node]) -> list[gs.Node]:
    """Removes each node of `start` whose outputs nothing reads any more, then its producers likewise.

    Nodes that had no reader before are not touched unless they feed a removed one. Subgraphs count as readers, and so
    do the outputs of every graph inside `root`.

    Returns:
        The removed nodes.
    """
    kept = {id(tensor) for graph in all_graphs(root) for tensor in graph.outputs}
    home = {id(node): graph for graph in all_graphs(root) for node in graph.nodes}
    removed: dict[int, gs.Node] = {}
    pending = list(start)
    while pending:
        node = pending.pop()
        if id(node) in removed or id(node) not in home:
            continue
        if any(tensor.outputs or id(tensor) in kept for tensor in node.outputs):
            continue
        removed[id(node)] = node
        pending += [producer for tensor in _read(node) for producer in tensor.inputs]
        _detach(node)
    for graph in {id(g): g for g in (home[key] for key in removed)}.values():
        graph.nodes[:] = [node for node in graph.nodes if id(node) not in removed]
    return list(removed.values())


def _read(node: gs.Node) -> list[gs.Tensor]:
    """Tensors that a node reads, those that its subgraphs read from outside included."""
    inner = [n for graph in _bodies(node) for g in all_graphs(graph) for n in g.nodes]
    outputs = [t for graph in _bodies(node) for g in all_graphs(graph) for t in g.outputs]
    return [*node.inputs, *(t for n in inner for t in n.inputs), *outputs]


def _bodies(node: gs.Node) -> list[gs.Graph]:
    return [value for value in node.attrs.values() if isinstance(value, gs.Graph)]


def _detach(node: gs.Node) -> None:
    for graph in _bodies(node):
        for inner in all_graphs(graph):
            for n in inner.nodes:
                n.inputs.clear()
    node.inputs.clear()
    node.outputs.clear()
