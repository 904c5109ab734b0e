"""A small index over the main graph of an ONNX protobuf: who makes and who reads each tensor, and what is constant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import numpy_helper


class ProtoGraph:
    """Edits of `graph` go through this object, so that its maps stay true.

    Attributes:
        graph: the protobuf, edited in place.
        producers: node that makes a tensor.
        initializers: by name, without those that a caller may override, which are graph inputs as well.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        inputs = {value.name for value in graph.input}
        self.initializers = {i.name: i for i in graph.initializer if i.name not in inputs}
        self.producers: dict[str, onnx.NodeProto] = {}
        self._readers: dict[str, int] = defaultdict(int)
        self._arrays: dict[str, np.ndarray] = {}
        self._names: set[str] = inputs | set(self.initializers)
        for node in graph.node:
            self._add(node)
            for inner in (g for part in subgraphs(node) for g in all_graphs(part)):  # names are unique in all graphs
                self._names.update(value.name for value in (*inner.input, *inner.initializer))
                self._names.update(name for made in inner.node for name in made.output)
        for output in graph.output:
            self._readers[output.name] += 1

    def readers(self, tensor: str) -> int:
        """How many inputs (of nodes at any depth) and graph outputs read `tensor`."""
        return self._readers[tensor]

    def constant(self, tensor: str) -> np.ndarray | None:
        """The value of an initializer or Constant, also behind Identity; None when it is known at run time only."""
        if tensor in self._arrays:
            return self._arrays[tensor]
        value = None
        if tensor in self.initializers:
            value = numpy_helper.to_array(self.initializers[tensor])
        elif (node := self.producers.get(tensor)) is not None:
            if node.op_type == "Identity" and not node.domain:
                value = self.constant(node.input[0])
            elif node.op_type == "Constant":
                value = constant_value(node)
        if value is not None:
            self._arrays[tensor] = value
        return value

    def add_constant(self, name: str, array: np.ndarray) -> str:
        """A new initializer; returns its name, made unique."""
        name = self.fresh(name)
        tensor = numpy_helper.from_array(np.ascontiguousarray(array), name)
        self.graph.initializer.append(tensor)
        self.initializers[name] = self.graph.initializer[-1]
        return name

    def fresh(self, name: str) -> str:
        """`name`, or with a number behind it when a tensor of that name exists."""
        number, candidate = 0, name
        while candidate in self._names:
            number += 1
            candidate = f"{name}_{number}"
        self._names.add(candidate)
        return candidate

    def replace_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Makes `nodes`, in this order, the nodes of the graph."""
        copies = []
        for node in nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copies.append(copy)
        del self.graph.node[:]
        self.graph.node.extend(copies)
        self.__init__(self.graph)  # type: ignore[misc]

    def _add(self, node: onnx.NodeProto) -> None:
        for name in node.output:
            if name:
                self.producers[name] = node
                self._names.add(name)
        for name in read_names(node):
            self._readers[name] += 1


def read_names(node: onnx.NodeProto) -> Iterator[str]:
    """Tensors a node reads, those its subgraphs capture included."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        inner = {i.name for i in graph.initializer} | {i.name for i in graph.input}
        inner |= {name for n in graph.node for name in n.output}
        captured = [name for n in graph.node for name in read_names(n)] + [o.name for o in graph.output]
        yield from (name for name in captured if name not in inner)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph` and every graph inside it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from all_graphs(inner)


def constant_value(node: onnx.NodeProto) -> np.ndarray | None:
    """The value of a Constant node (tensor or numbers)."""
    for attribute in node.attribute:
        if attribute.name == "value":
            return numpy_helper.to_array(attribute.t)
        if attribute.name in ("value_float", "value_floats"):
            return np.asarray(onnx.helper.get_attribute_value(attribute), np.float32)
        if attribute.name in ("value_int", "value_ints"):
            return np.asarray(onnx.helper.get_attribute_value(attribute), np.int64)
    return None


def attributes_of(node: onnx.NodeProto) -> dict[str, object]:
    """Attributes by name; text as str."""
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def drop_dead(graph: onnx.GraphProto) -> None:
    """Removes nodes and initializers that no output needs."""
    needed = drop_dead_nodes(graph)
    if any(i.name not in needed for i in graph.initializer):
        alive = [onnx.TensorProto.FromString(i.SerializeToString()) for i in graph.initializer if i.name in needed]
        del graph.initializer[:]
        graph.initializer.extend(alive)


def drop_dead_nodes(graph: onnx.GraphProto) -> set[str]:
    """Removes nodes that no output needs; returns the names of the tensors that are needed."""
    needed = {o.name for o in graph.output}
    kept = []
    for node in reversed(graph.node):
        if any(name in needed for name in node.output):
            kept.append(node)
            needed.update(read_names(node))
    if len(kept) < len(graph.node):
        copies = []
        for node in reversed(kept):
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copies.append(copy)
        del graph.node[:]
        graph.node.extend(copies)
    return needed
