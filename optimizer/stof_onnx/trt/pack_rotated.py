"""Projections of Q and K behind a rotary embedding, and V, become one GEMM region that rotates Q and K on the way out.

The attention then takes one packed tensor [B*S, W], as behind pack_qkv.py, and no operator of the rotation is left. The
columns of Q and K are in another order within each head (rotary.py), which no one but the attention sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx

from stof_onnx.graph.proto_graph import ProtoGraph, attributes_of
from stof_onnx.graph.proto_shapes import SymbolicShapes
from stof_onnx.trt.pack_qkv import Projection, flat_rows, packed, packed_plugin, packed_region, projection_of
from stof_onnx.trt.plugin_nodes import is_plugin
from stof_onnx.trt.region_nodes import PackedRegion, RegionLowering, RotatedRegions
from stof_onnx.trt.rotary import Cut, RotationFinder, paired

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
    widths = heads * dim, kv_heads * dim, kv_heads * v_dim
    total, turned = sum(widths), widths[0] + widths[1]

    def is_projection(tensor: str) -> bool:
        return projection_of(graph, tensor, shapes, graph.readers(tensor)) is not None

    q = finder.find(node.input[0], heads, dim, 0, total, is_projection)
    k = finder.find(node.input[1], kv_heads, dim, widths[0], total, is_projection) if q else None
    if q is None or q.turns is None or k is None or k.turns is None or not np.array_equal(q.turns, k.turns):
        return None
    cuts = [q, k]
    if q.whole:
        v = finder.find_plain(node.input[2], kv_heads, v_dim, turned, total, is_projection)
        cuts += [v] if v is not None else []
        if len({cut.projection for cut in cuts}) > 1 or len(cuts) < 3 or not k.whole:
            return None
    parts = _projections(graph, node, shapes, cuts)
    if parts is None or [sum(p.weight.shape[1] for p in parts)] != [total]:
        return None
    if not q.whole and [p.weight.shape[1] for p in parts] != list(widths):
        return None
    if len({(p.x, p.weight.shape[0], p.weight.dtype) for p in parts}) > 1:
        return None
    x, depth, base = parts[0].x, parts[0].weight.shape[0], node.name or node.output[0]
    new: list[onnx.NodeProto] = []
    rows_of, rows = (x, flat_rows(graph, x, depth, base, new)) if shapes.rank(x) == 3 else (q.projection, x)
    rotation = q.turns.reshape(len(q.turns), dim), turned
    qkv = packed_region(graph, rows, [_paired(parts, turned, dim)], base, new, region, rotation)
    if not qkv:
        return None
    shapes.note_flats([rows], rows_of, depth)
    shapes.note_flats([qkv], rows_of, total)
    return new + packed_plugin(graph, node, qkv, rows_of, len(q.turns), shapes)


def _projections(
    graph: ProtoGraph, node: onnx.NodeProto, shapes: SymbolicShapes, cuts: Sequence[Cut]
) -> list[Projection] | None:
    """The GEMMs behind the cuts, in order, and V's own where it has one; None where others read a tensor between."""
    nodes = {n.output[0]: n for cut in cuts for n in cut.nodes}.values()
    reads = Counter(name for n in nodes for name in n.input)
    reads.update(node.input[: len(cuts)])
    if any(graph.readers(name) != reads[name] for cut in cuts for name in cut.holds):
        return None
    names = list(dict.fromkeys(cut.projection for cut in cuts))
    found = [projection_of(graph, name, shapes, reads[name]) for name in names]
    if len(cuts) < 3:
        found.append(projection_of(graph, node.input[2], shapes) if shapes.rank(node.input[2]) == 3 else None)
    parts = [p for p in found if p is not None]
    return parts if len(parts) == len(found) else None


def _paired(parts: Sequence[Projection], turned: int, head_dim: int) -> Projection:
    """All of them as one, partners of the first `turned` columns side by side."""
    weight, *bias = packed(parts)
    arrays = [np.concatenate([paired(a[..., :turned], head_dim), a[..., turned:]], -1) for a in (weight, *bias)]
    return Projection(parts[0].x, arrays[0], arrays[1] if bias else None)
