"""The part of a model between given tensors, as a model of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx

from stof_onnx.graph.walk import used_names


def needed_nodes(graph: onnx.GraphProto, outputs: Iterable[str], cut: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that compute `outputs` when the tensors in `cut` are given, in graph order."""
    producer = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    given = set(cut)
    wanted: set[int] = set()
    stack = [name for name in outputs if name not in given]
    while stack:
        index = producer.get(stack.pop())
        if index is not None and index not in wanted:
            wanted.add(index)
            stack += [name for name in used_names([graph.node[index]]) if name not in given]
    return [graph.node[i] for i in sorted(wanted)]


def extract(
    proto: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, np.ndarray], outputs: Iterable[str]
) -> onnx.ModelProto:
    """A model of `nodes` whose inputs have the dtypes of `inputs` and any shape; other names stay what they are.

    Graph inputs that the nodes still read must be in `inputs`; initializers and functions come along.
    """
    out = onnx.ModelProto(ir_version=proto.ir_version)
    out.opset_import.extend(proto.opset_import)
    out.functions.extend(proto.functions)
    graph = out.graph
    graph.name = proto.graph.name
    graph.node.extend(nodes)
    read = used_names(nodes) | set(outputs)
    for name, value in inputs.items():
        if name in read:
            dtype = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            graph.input.append(onnx.helper.make_tensor_value_info(name, dtype, [None] * value.ndim))
    graph.initializer.extend(t for t in proto.graph.initializer if t.name in read and t.name not in inputs)
    graph.sparse_initializer.extend(s for s in proto.graph.sparse_initializer if s.values.name in read)
    graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in outputs)
    return out
