"""Mends two common faults of models: a domain that is not imported, and nodes out of order."""

from __future__ import annotations

import onnx

from stof_onnx.graph.walk import all_graphs, all_nodes, model_nodes, node_graphs, used_names

_CONTRIB_VERSION = 1


def mend(proto: onnx.ModelProto) -> list[str]:
    """Repairs `proto` in place; returns one line for each repair."""
    return _import_domains(proto) + _sort(proto)


def _import_domains(proto: onnx.ModelProto) -> list[str]:
    notes = []
    imported = {"" if o.domain == "ai.onnx" else o.domain for o in proto.opset_import}
    local = {f.domain for f in proto.functions}
    for domain in dict.fromkeys(n.domain for n in model_nodes(proto)):
        if domain in imported or domain in ("", "ai.onnx"):
            continue
        proto.opset_import.append(onnx.helper.make_opsetid(domain, _CONTRIB_VERSION))
        imported.add(domain)
        kind = "the model's own functions" if domain in local else f"domain {domain}"
        notes.append(f"repaired: {kind} was not imported; imported {domain} version {_CONTRIB_VERSION}")
    for function in proto.functions:
        known = {o.domain for o in function.opset_import}
        for domain in dict.fromkeys(n.domain for n in all_nodes(function.node)):
            if domain not in known and domain != "ai.onnx":
                version = next((o.version for o in proto.opset_import if o.domain == domain), None)
                if version is not None:
                    function.opset_import.append(onnx.helper.make_opsetid(domain, version))
                    known.add(domain)
    return notes


def _sort(proto: onnx.ModelProto) -> list[str]:
    holders = [*all_graphs(proto.graph), *proto.functions]
    for function in proto.functions:
        holders += [g for node in function.node for inner in node_graphs(node) for g in all_graphs(inner)]
    # Inner graphs first: sorting copies the nodes, and with them the graphs inside.
    changed = [sort_nodes(h) for h in reversed(holders)]
    return ["repaired: nodes were not in topological order"] if any(changed) else []


def sort_nodes(holder: onnx.GraphProto | onnx.FunctionProto) -> bool:
    """Stable topological sort of a graph's or function's nodes; False when they were in order (or are cyclic)."""
    nodes = list(holder.node)
    producer = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needs = [{producer[n] for n in used_names([node]) if n in producer} - {i} for i, node in enumerate(nodes)]
    if all(j < i for i, need in enumerate(needs) for j in need):
        return False
    order: list[int] = []
    placed = [False] * len(nodes)
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            i = stack[-1]
            missing = [j for j in sorted(needs[i]) if not placed[j]]
            if placed[i] or not missing:
                stack.pop()
                if not placed[i]:
                    placed[i] = True
                    order.append(i)
            elif any(j in stack for j in missing):
                return False  # a cycle: the checker says so
            else:
                stack.extend(reversed(missing))
    copies = []
    for i in order:
        copy = onnx.NodeProto()
        copy.CopyFrom(nodes[i])
        copies.append(copy)
    del holder.node[:]
    holder.node.extend(copies)
    return True
