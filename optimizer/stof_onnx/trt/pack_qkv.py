"""Projections that share an input become one GEMM, whose output the plugin takes as one packed [B*S, W] tensor.

Q, K and V in BSHD of rank 3 are packed where they are
- `x W + b` (MatMul, MatMul + Add) of one x with constant weights, or Reshape(Gemm) of one 2-D input, or
- the three outputs of one Split along the last axis, in order: then the tensor that is split is packed already.
TensorRT then makes no copy beside the plugin, and one GEMM instead of three.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from stof_onnx.graph.proto_graph import ProtoGraph, attributes_of
from stof_onnx.graph.proto_shapes import Dim, SymbolicShapes
from stof_onnx.trt.plugin_nodes import is_plugin
from stof_onnx.trt.region_nodes import PackedRegion, gemm_region, narrowed


@dataclass(frozen=True)
class Projection:
    """x W (+ b). `x` has rank 3, or rank 2 where a Reshape to rank 3 follows."""

    x: str
    weight: np.ndarray
    bias: np.ndarray | None


def pack_qkv(model: onnx.ModelProto, shapes: SymbolicShapes, regions: Mapping[str, PackedRegion] | None = None) -> int:
    """Packs every plugin node of the main graph that can be; returns how many. New tensors get their shapes.

    Args:
        regions: attentions whose packed projections become a GEMM region.
    """
    graph = ProtoGraph(model.graph)
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in model.graph.node:
        new = _pack(graph, node, shapes, (regions or {}).get(node.name)) if is_plugin(node) else None
        count += new is not None
        nodes += new or [node]
    if count:
        graph.replace_nodes(nodes)
    return count


def _pack(
    graph: ProtoGraph, node: onnx.NodeProto, shapes: SymbolicShapes, region: PackedRegion | None
) -> list[onnx.NodeProto] | None:
    attributes = attributes_of(node)
    if attributes["layout"] not in ("BSHD", "BSHD,BSHD,BSHD,BSHD"):
        return None
    q, k, v = node.input[:3]
    if any(shapes.rank(name) != 3 for name in (q, k, v)):
        return None
    heads, kv_heads, dim, v_dim = (int(attributes[a]) for a in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim"))  # type: ignore[call-overload]
    widths = [heads * dim, kv_heads * dim, kv_heads * v_dim]
    base = node.name or node.output[0]
    source = _split_source(graph, (q, k, v), widths)
    new: list[onnx.NodeProto] = []
    if source is not None:
        rows_of = source
        qkv = flat_rows(graph, source, sum(widths), base, new)
        shapes.note_flats([qkv], rows_of, sum(widths))
    else:
        projections = [projection_of(graph, name, shapes) for name in (q, k, v)]
        found = [p for p in projections if p is not None]
        if len(found) < 3 or len({p.x for p in found}) > 1 or len({p.weight.dtype for p in found}) > 1:
            return None
        if [p.weight.shape[1] for p in found] != widths or len({p.weight.shape[0] for p in found}) > 1:
            return None
        rows_of, x = q, found[0].x
        if shapes.rank(x) == 3:
            rows_of = x
            x = flat_rows(graph, x, found[0].weight.shape[0], base, new)
        shapes.note_flats([x], rows_of, found[0].weight.shape[0])
        first = len(new)
        qkv = _gemm(graph, x, found, base, new, region)
        shapes.note_flats([n.output[0] for n in new[first:]], rows_of, sum(widths))
    return new + packed_plugin(graph, node, qkv, rows_of, shapes.dim(q, 1), shapes)


def packed_plugin(
    graph: ProtoGraph, node: onnx.NodeProto, qkv: str, rows_of: str, seq: Dim, shapes: SymbolicShapes
) -> list[onnx.NodeProto]:
    """The attention on packed rows, and its output in rank 3."""
    attributes, new = attributes_of(node), list[onnx.NodeProto]()
    out_width = int(attributes["num_heads"]) * int(attributes["v_head_dim"])  # type: ignore[call-overload]
    plugin = onnx.NodeProto()
    plugin.CopyFrom(node)
    del plugin.input[:], plugin.output[:]
    plugin.input.extend([qkv, *node.input[3:]])
    kept = [a for a in plugin.attribute if a.name not in ("layout", "seq")]
    del plugin.attribute[:]
    plugin.attribute.extend([*kept, helper.make_attribute("layout", "packed")])
    out = graph.fresh(f"{node.output[0]}_2d")
    plugin.output.append(out)
    if isinstance(seq, int):
        plugin.attribute.append(helper.make_attribute("seq", seq))
    else:
        plugin.input.append(carrier(graph, rows_of, new))
    new.append(plugin)
    shapes.note_flats([out], rows_of, out_width)
    new += to_rank_3(graph, out, node.output[0], out_width, shapes.leading(rows_of), rows_of)
    shapes.note_same_rows(node.output[0], rows_of, out_width)
    return new


def carrier(graph: ProtoGraph, rows_of: str, new: list[onnx.NodeProto]) -> str:
    """A small tensor [B, S, 1] cut from `rows_of` [B, S, *]: it tells the plugin S, its contents are not read."""
    bounds = {"from": 0, "to": 1, "axis": 2}
    limits = [graph.add_constant(f"stof/slice_{n}", np.array([v], np.int64)) for n, v in bounds.items()]
    name = graph.fresh(f"{rows_of}_carrier")
    new.append(helper.make_node("Slice", [rows_of, *limits], [name], name=name))
    return name


def to_rank_3(
    graph: ProtoGraph, flat: str, output: str, width: int, leading: Sequence[int | str | None], rows_of: str
) -> list[onnx.NodeProto]:
    """Reshapes `flat` [B*S, width] to `output` [B, S, width]; sizes known only at run time come from `rows_of`."""
    batch, seq = leading
    if isinstance(seq, int):
        sizes = [-1, seq, width]
    elif isinstance(batch, int):
        sizes = [batch, -1, width]
    else:
        shape, front, both = (graph.fresh(f"{output}_{part}") for part in ("shape", "rows", "sizes"))
        zero, two = (graph.add_constant(f"stof/{n}", np.array([n], np.int64)) for n in (0, 2))
        last = graph.add_constant("stof/width", np.array([width], np.int64))
        return [
            helper.make_node("Shape", [rows_of], [shape], name=shape),
            helper.make_node("Slice", [shape, zero, two], [front], name=front),
            helper.make_node("Concat", [front, last], [both], name=both, axis=0),
            helper.make_node("Reshape", [flat, both], [output], name=f"{output}_3d"),
        ]
    target = graph.add_constant("stof/sizes", np.array(sizes, np.int64))
    return [helper.make_node("Reshape", [flat, target], [output], name=f"{output}_3d")]


def flat_rows(graph: ProtoGraph, source: str, width: int, base: str, new: list[onnx.NodeProto]) -> str:
    """`source` [B, S, width] as [B*S, width], by a node that goes to `new`."""
    target = graph.add_constant("stof/flat", np.array([-1, width], np.int64))
    name = graph.fresh(f"{source}_rows")
    new.append(helper.make_node("Reshape", [source, target], [name], name=f"{base}/flatten"))
    return name


def _gemm(
    graph: ProtoGraph,
    flat: str,
    parts: Sequence[Projection],
    base: str,
    new: list[onnx.NodeProto],
    region: PackedRegion | None,
) -> str:
    if region is not None and (name := packed_region(graph, flat, parts, base, new, region)):
        return name
    arrays = packed(parts)
    weight = graph.add_constant(f"{base}/w_qkv", arrays[0])
    product = graph.fresh(f"{base}/qkv_product")
    new.append(helper.make_node("MatMul", [flat, weight], [product], name=product))
    if len(arrays) == 1:
        return product
    bias = graph.add_constant(f"{base}/b_qkv", arrays[1])
    total = graph.fresh(f"{base}/qkv")
    new.append(helper.make_node("Add", [product, bias], [total], name=total))
    return total


def packed(parts: Sequence[Projection]) -> list[np.ndarray]:
    """The weights side by side, and the biases if there are any."""
    weight = np.concatenate([p.weight for p in parts], axis=1)
    if all(p.bias is None for p in parts):
        return [weight]
    biases = [np.zeros(p.weight.shape[1], p.weight.dtype) if p.bias is None else p.bias for p in parts]
    return [weight, np.concatenate(biases)]


def packed_region(
    graph: ProtoGraph,
    flat: str,
    parts: Sequence[Projection],
    base: str,
    new: list[onnx.NodeProto],
    region: PackedRegion,
    rotation: tuple[np.ndarray, int] | None = None,
) -> str:
    """The packed GEMM as a region; empty where its weights do not fit the engine's type.

    Args:
        rotation: cos and sin [S, D] of the pairs of a head, and how many columns are rotated.
    """
    stored = [narrowed(array, region.dtype) for array in packed(parts)]
    if any(array is None for array in stored):
        region.lowering.reason = f"its weights do not fit {region.dtype}"
        return ""
    names = [graph.add_constant(f"{base}/qkv_{i}", array) for i, array in enumerate(stored) if array is not None]
    output = graph.fresh(f"{base}/qkv")
    heads = (0, 0)
    if rotation is not None:
        turns, columns = rotation
        heads = columns, turns.shape[1]
        names.append(_shared(graph, f"stof/rotation_{turns.shape[1]}", turns))
    new.append(gemm_region([flat, *names], output, region.config, region.domain, len(stored) > 1, heads))
    region.lowering.template, region.lowering.reason = "gemm_epilogue", ""
    return output


def _shared(graph: ProtoGraph, name: str, array: np.ndarray) -> str:
    """The initializer of an array that other layers may have as well."""
    made = f"{name}_{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    return made if made in graph.initializers else graph.add_constant(made, array)


def _split_source(graph: ProtoGraph, tensors: Sequence[str], widths: list[int]) -> str | None:
    """The tensor that one Split along the last axis cuts into exactly these."""
    split = graph.producers.get(tensors[0])
    if split is None or split.op_type != "Split" or list(split.output) != list(tensors):
        return None
    if attributes_of(split).get("axis", 0) not in (-1, 2):
        return None
    sizes = graph.constant(split.input[1]) if len(split.input) > 1 else None
    if (sizes is None and len(set(widths)) > 1) or (sizes is not None and sizes.tolist() != widths):
        return None
    return str(split.input[0])


def projection_of(graph: ProtoGraph, tensor: str, shapes: SymbolicShapes, readers: int = 1) -> Projection | None:
    """How `tensor` [B, S, N], which so many inputs read, is made from x, where nothing else reads what lies between."""
    bias: np.ndarray | None = None
    node = graph.producers.get(tensor)
    if node is None or graph.readers(tensor) != readers:
        return None
    if node.op_type == "Reshape":  # of a Gemm's rows
        gemm = graph.producers.get(node.input[0])
        if gemm is None or gemm.op_type != "Gemm" or graph.readers(node.input[0]) != 1:
            return None
        return _gemm_projection(graph, gemm)
    if node.op_type == "Add":
        values = [graph.constant(name) for name in node.input]
        if (values[0] is None) == (values[1] is None):
            return None
        side = 1 if values[0] is not None else 0
        constant = values[1 - side]
        assert constant is not None
        if constant.ndim != 1:
            return None
        bias = constant
        product = node.input[side]
        node = graph.producers.get(product)
        if node is None or graph.readers(product) != 1:
            return None
    if node.op_type != "MatMul" or shapes.rank(node.input[0]) != 3:
        return None
    weight = graph.constant(node.input[1])
    if weight is None or weight.ndim != 2 or (bias is not None and bias.shape != (weight.shape[1],)):
        return None
    return Projection(str(node.input[0]), weight, bias)


def _gemm_projection(graph: ProtoGraph, gemm: onnx.NodeProto) -> Projection | None:
    attributes = attributes_of(gemm)
    if attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        return None
    weight = graph.constant(gemm.input[1])
    bias = graph.constant(gemm.input[2]) if len(gemm.input) > 2 and gemm.input[2] else None
    if weight is None or weight.ndim != 2 or (bias is None and len(gemm.input) > 2 and gemm.input[2]):
        return None
    weight = weight.T if attributes.get("transB", 0) else weight
    if bias is not None and bias.shape != (weight.shape[1],):
        return None
    return Projection(str(gemm.input[0]), weight, bias)
