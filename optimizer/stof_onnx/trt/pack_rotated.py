"""Projections of Q and K behind a rotary embedding, and V, become one GEMM region that rotates Q and K on the way out.

The attention then takes one packed tensor [B*S, W], as behind pack_qkv.py, and no operator of the rotation is left. The
columns of Q and K are in another order within each head (rotary.py), which no one but the attention sees.
"""

from __future__ import annotations

import numpy as np
import onnx

from stof_onnx.graph.proto_graph import ProtoGraph, attributes_of
from stof_onnx.graph.proto_shapes import SymbolicShapes
from stof_onnx.trt.pack_qkv import Projection, flat_rows, packed_plugin, packed_region, projection_of
from stof_onnx.trt.plugin_nodes import is_plugin
from stof_onnx.trt.region_nodes import PackedRegion, RegionLowering, RotatedRegions
from stof_onnx.trt.rotary import Rotation, RotationFinder, paired

_LAYOUT = "BHSD,BHSD,BSHD,BSHD"


def may_rotate(model: onnx.ModelProto, regions: RotatedRegions) -> bool:
    """Whether `pack_rotated` would look closer at any attention."""
    return any(_is_candidate(node) and regions.region(node.name, node.input[2]) for node in model.graph.node)


def pack_rotated(model: onnx.ModelProto, shapes: SymbolicShapes, regions: RotatedRegions) -> list[RegionLowering]:
    """Packs every plugin node of the main graph that can be; one entry for each. New tensors get their shapes."""
    graph = ProtoGraph(model.graph)
    finder = RotationFinder(model, graph, shapes)
    nodes: list[onnx.NodeProto] = []
    found: list[RegionLowering] = []
    for node in model.graph.node:
        region = regions.region(node.name, node.input[2]) if _is_candidate(node) else None
        new = None if region is None else _pack(graph, node, shapes, finder, region)
        if new is not None and region is not None:
            found.append(region.lowering)
        nodes += new or [node]
    if found:
        graph.replace_nodes(nodes)
    return found


def _is_candidate(node: onnx.NodeProto) -> bool:
    return is_plugin(node) and attributes_of(node)["layout"] == _LAYOUT


def _pack(
    graph: ProtoGraph, node: onnx.NodeProto, shapes: SymbolicShapes, finder: RotationFinder, region: PackedRegion
) -> list[onnx.NodeProto] | None:
    attributes = attributes_of(node)
    heads, kv_heads, dim, v_dim = (int(attributes[a]) for a in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim"))  # type: ignore[call-overload]
    q, k, v = node.input[:3]
    value = projection_of(graph, v, shapes) if shapes.rank(v) == 3 else None
    if value is None or shapes.rank(value.x) != 3:
        return None

    def is_projection(tensor: str) -> bool:
        return projection_of(graph, tensor, shapes, graph.readers(tensor)) is not None

    turned = finder.find(q, heads, dim, is_projection), finder.find(k, kv_heads, dim, is_projection)
    rotations = [rotation for rotation in turned if rotation is not None]
    if len(rotations) < 2 or not np.array_equal(rotations[0].turns, rotations[1].turns):
        return None
    parts = [*(_paired(graph, rotation, dim, shapes) for rotation in rotations), value]
    widths = [heads * dim, kv_heads * dim, kv_heads * v_dim]
    sources = {(p.x, p.weight.shape[0], p.weight.dtype) for p in parts}
    if [p.weight.shape[1] for p in parts] != widths or len(sources) > 1:
        return None
    base, turns = node.name or node.output[0], rotations[0].turns
    new: list[onnx.NodeProto] = []
    rows = flat_rows(graph, value.x, value.weight.shape[0], base, new)
    qkv = packed_region(graph, rows, parts, base, new, region, (turns.reshape(len(turns), dim), widths[0] + widths[1]))
    if not qkv:
        return None
    shapes.note_flats([rows], value.x, value.weight.shape[0])
    shapes.note_flats([qkv], value.x, sum(widths))
    return new + packed_plugin(graph, node, qkv, value.x, len(turns), shapes)


def _paired(graph: ProtoGraph, rotation: Rotation, head_dim: int, shapes: SymbolicShapes) -> Projection:
    found = projection_of(graph, rotation.projection, shapes, rotation.readers)
    assert found is not None  # that is how the rotation was found
    bias = None if found.bias is None else paired(found.bias, head_dim)
    return Projection(found.x, paired(found.weight, head_dim), bias)
