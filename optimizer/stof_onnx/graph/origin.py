"""Remembers which protobuf object each graph-surgeon object was imported from, so that saving can reuse it.

onnx-graphsurgeon keeps neither doc strings nor metadata of nodes, nor attributes of some types; the originals do.
Objects are keyed by identity (graph-surgeon objects compare by content) and held, so that no id is ever reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import onnx_graphsurgeon as gs


class NodeOrigin:
    """A node's protobuf and the attribute values it had on import."""

    def __init__(self, node: gs.Node, proto: onnx.NodeProto) -> None:
        self.node = node
        self.proto = proto
        self.attrs: dict[str, Any] = {k: list(v) if isinstance(v, list) else v for k, v in node.attrs.items()}


class Origin:
    """Pairs every node, graph and function of a freshly imported `graph` with its protobuf in `proto`."""

    def __init__(self, graph: gs.Graph, proto: onnx.ModelProto) -> None:
        self._nodes: dict[int, NodeOrigin] = {}
        self._graphs: dict[int, tuple[gs.Graph, onnx.GraphProto]] = {}
        self._functions: dict[int, tuple[gs.Function, onnx.FunctionProto]] = {}
        self._add_graph(graph, proto.graph)
        for function, function_proto in zip(graph.functions, proto.functions, strict=True):
            self._functions[id(function)] = (function, function_proto)
            self._add_nodes(function.nodes, function_proto.node)

    def _add_graph(self, graph: gs.Graph, proto: onnx.GraphProto) -> None:
        self._graphs[id(graph)] = (graph, proto)
        self._add_nodes(graph.nodes, proto.node)

    def _add_nodes(self, nodes: list[gs.Node], protos: Any) -> None:
        for node, proto in zip(nodes, protos, strict=True):
            self._nodes[id(node)] = NodeOrigin(node, proto)
            for attribute in proto.attribute:
                value = node.attrs.get(attribute.name)
                if isinstance(value, gs.Graph):
                    self._add_graph(value, attribute.g)

    def node(self, node: gs.Node) -> NodeOrigin | None:
        """The origin of `node`, or None when it was made after the import."""
        return self._nodes.get(id(node))

    def graph(self, graph: gs.Graph) -> onnx.GraphProto | None:
        """The protobuf of a graph or subgraph, or None when it was made after the import."""
        entry = self._graphs.get(id(graph))
        return entry[1] if entry else None

    def function(self, function: gs.Function) -> onnx.FunctionProto | None:
        """The protobuf of a model-local function, or None when it was made after the import."""
        entry = self._functions.get(id(function))
        return entry[1] if entry else None

    def graphs(self) -> Iterator[tuple[gs.Graph, onnx.GraphProto]]:
        """Every imported graph and subgraph (functions' own subgraphs included)."""
        yield from self._graphs.values()
