"""Puts a plan's regions into a model: each kept segment becomes one function call."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from stof_onnx.attention.functions import DOMAIN
from stof_onnx.fusion.functions import region_function, region_node
from stof_onnx.fusion.plan import FusionPlan, PlannedRegion
from stof_onnx.fusion.segment import Segment, block_hash
from stof_onnx.fusion.sequence import find_blocks
from stof_onnx.fusion.templates import Instance, recognise
from stof_onnx.fusion.tensors import Tensors
from stof_onnx.graph.proto_graph import read_names
from stof_onnx.graph.repair import sort_nodes


@dataclass(frozen=True)
class AppliedRegion:
    """One region that is in the model now: its node, the function that it calls, and what the plan says of it."""

    node: str
    function: str
    planned: PlannedRegion


def apply_plan(
    proto: onnx.ModelProto, initializers: list[onnx.TensorProto], tensors: Tensors, plan: FusionPlan, opset: int
) -> list[AppliedRegion]:
    """Edits `proto` (nodes and functions) and `initializers` in place: kept regions of blocks that the plan knows.

    Args:
        proto: the model that `tensors` was made of, not edited since.
        initializers: of its main graph; those that only became constants of functions are dropped.
        plan: a region that no template computes any more is left out.
        opset: of the default domain.
    """
    applied: list[AppliedRegion] = []
    new: dict[int, onnx.NodeProto] = {}
    gone: set[int] = set()
    names = {node.name for node in tensors.nodes}
    functions: dict[str, onnx.FunctionProto] = {}
    for block in find_blocks(tensors):
        planned = plan.blocks.get(block_hash(block))
        if planned is not None and len(planned.bits) != len(block):  # of a plan edited by hand
            planned = None
        for region in planned.regions if planned else ():
            segment = Segment(block, region.start, region.stop)
            instance = recognise(segment)
            if not region.kept or segment.hash != region.hash or not isinstance(instance, Instance):
                continue
            node = region_node(segment, instance, region.config)
            while node.name in names:  # ONNX Runtime refuses a name that two nodes have, and lowering tells them by it
                node.name += "_"
            names.add(node.name)
            function = region_function(segment, instance, opset)
            functions.setdefault(function.name, function)
            indices = [operator.index for operator in segment.operators]
            gone.update(indices)
            new[indices[-1]] = node
            applied.append(AppliedRegion(node.name, node.op_type, region))
    if applied:
        nodes = [new.get(i, node) for i, node in enumerate(tensors.nodes) if i in new or i not in gone]
        before = {name for i in gone for name in read_names(tensors.nodes[i])}
        nodes = _without_unread(nodes, before, tensors.graph_outputs)
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del proto.graph.node[:]
        proto.graph.node.extend(copies)
        sort_nodes(proto.graph)
        known = {(f.domain, f.name) for f in proto.functions}
        proto.functions.extend(f for f in functions.values() if (f.domain, f.name) not in known)
        if DOMAIN not in {o.domain for o in proto.opset_import}:
            proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
        read = {name for node in copies for name in read_names(node)} | tensors.graph_outputs
        unread = {t.name for t in initializers if t.name in before and t.name not in read}
        initializers[:] = [t for t in initializers if t.name not in unread]
        alive = read | {name for node in copies for name in node.output}
        infos = [v for v in proto.graph.value_info if v.name in alive]
        kept = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in infos]
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(kept)
    return applied


def _without_unread(nodes: list[onnx.NodeProto], before: set[str], outputs: set[str]) -> list[onnx.NodeProto]:
    """Drops constants that only the replaced operators read."""
    while True:
        read = {name for node in nodes for name in read_names(node)} | outputs
        dead = [n for n in nodes if any(o in before for o in n.output) and not any(o in read for o in n.output)]
        if not dead:
            return nodes
        before = before | {name for node in dead for name in read_names(node)}
        nodes = [node for node in nodes if not any(node is d for d in dead)]
