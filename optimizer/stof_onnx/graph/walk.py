"""Visits the parts of a protobuf model, subgraphs and functions included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Every node in `nodes` and in the graphs inside them."""
    for node in nodes:
        yield node
        for graph in node_graphs(node):
            yield from all_nodes(graph.node)


def node_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs directly inside a node (If branches, loop bodies)."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph` and every graph inside it."""
    yield graph
    for node in graph.node:
        for inner in node_graphs(node):
            yield from all_graphs(inner)


def model_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of a model: main graph, subgraphs, functions."""
    yield from all_nodes(proto.graph.node)
    for function in proto.functions:
        yield from all_nodes(function.node)


def model_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in a model: initializers, sparse initializers, attributes, functions' constants."""
    for graph in all_graphs(proto.graph):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
            yield sparse.indices
    for node in model_nodes(proto):
        yield from node_tensors(node)
    for function in proto.functions:
        for graph in (g for node in all_nodes(function.node) for g in node_graphs(node)):
            yield from graph.initializer


def node_tensors(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    """The tensors in a node's own attributes."""
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            yield attribute.sparse_tensor.values
            yield attribute.sparse_tensor.indices


def used_names(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Names that `nodes` read, including those that their subgraphs read."""
    return {name for node in all_nodes(nodes) for name in node.input} | {
        out.name for node in nodes for graph in node_graphs(node) for g in all_graphs(graph) for out in g.output
    }
