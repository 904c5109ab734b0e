"""Shape arithmetic of fixed sizes becomes constants, so that it does not part the operators that it stands between.

Exporters that trace with dynamic axes write Shape, Gather, Concat between a GEMM and the sum behind it. What nothing
reads then, or never did, goes as well: builders drop it, and no region should compute it.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from stof_onnx.fusion.tensors import Tensors
from stof_onnx.graph.fold_small import fold_small
from stof_onnx.graph.proto_graph import drop_dead_nodes
from stof_onnx.graph.proto_shapes import infer_shapes


def fold_fixed_shapes(
    proto: onnx.ModelProto, initializers: list[onnx.TensorProto], base_dir: Path | None = None
) -> int:
    """Edits the main graph's nodes and `initializers` in place; returns how many operators are gone.

    Args:
        proto: its initializers are left out.
        initializers: of its main graph; external ones are not read.
    """
    light = Tensors(proto, initializers, None, base_dir).skeleton()
    known = {tensor.name for tensor in light.graph.initializer}
    while fold_small(light, infer_shapes(light).dims):
        pass
    drop_dead_nodes(light.graph)
    made = [tensor for tensor in light.graph.initializer if tensor.name not in known]
    folded = len(proto.graph.node) - len(light.graph.node)
    if folded:
        gone = {name for node in proto.graph.node for name in node.output}
        gone.difference_update(name for node in light.graph.node for name in node.output)
        del proto.graph.node[:]
        proto.graph.node.extend(light.graph.node)
        initializers.extend(onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in made)
        kept = [v for v in proto.graph.value_info if v.name not in gone]
        copies = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in kept]
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(copies)
    return folded
