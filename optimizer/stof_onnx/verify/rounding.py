"""Makes ONNX Runtime's CPU provider round half-precision models as their own arithmetic does.

That provider runs float16 operators in float32 and drops the casts between them, so that (x - 65504) + 65504 is x there
and 0 in float16: masks made of finite float16 constants would mean something else. Identity has a float16 kernel; two
of them after each operator keep the rounding (a single one between float32 operators is moved to float32 as well), as
long as the runtime does not optimize the graph.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from stof_onnx.graph.walk import all_graphs, model_nodes, model_tensors, node_graphs


def is_half(proto: onnx.ModelProto) -> bool:
    """True when a tensor, an input or a cast of the model is float16."""
    values = [v for g in all_graphs(proto.graph) for v in (*g.input, *g.output)]
    return (
        any(t.data_type == TensorProto.FLOAT16 for t in model_tensors(proto))
        or any(v.type.tensor_type.elem_type == TensorProto.FLOAT16 for v in values)
        or any(a.name == "to" and a.i == TensorProto.FLOAT16 for n in model_nodes(proto) for a in n.attribute)
    )


def round_each_step(proto: onnx.ModelProto) -> None:
    """Puts Identities behind every output of every operator of `proto`, in place; names stay with the rounded value."""
    for holder in [proto.graph, *proto.functions]:
        _round(holder)


def _round(holder: onnx.GraphProto | onnx.FunctionProto) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in holder.node:
        inner = list(node_graphs(node))
        for graph in inner:
            _round(graph)
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        nodes.append(copy)
        if inner or node.op_type == "Constant":
            continue
        for i, name in enumerate(node.output):
            if name:
                copy.output[i] = f"{name}__unrounded"
                nodes.append(onnx.helper.make_node("Identity", [copy.output[i]], [f"{name}__rounded"]))
                nodes.append(onnx.helper.make_node("Identity", [f"{name}__rounded"], [name]))
    del holder.node[:]
    holder.node.extend(nodes)
