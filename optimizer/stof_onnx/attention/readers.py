"""Who reads a tensor that is about to disappear. Exporters read its shape, often only to reshape it afterwards."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_graphsurgeon as gs
from stof_onnx.attention.movement import is_standard


def readers(tensor: gs.Tensor) -> tuple[list[gs.Node], list[gs.Node]]:
    """The nodes that read the data of `tensor`, and those that read only its shape; each once."""
    nodes = list({id(n): n for n in tensor.outputs}.values())
    of_shape = [n for n in nodes if n.op in ("Shape", "Size") and is_standard(n)]
    return [n for n in nodes if not any(n is s for s in of_shape)], of_shape


def vanish(nodes: Iterable[gs.Node], gone: set[int], leaving: set[int]) -> bool:
    """True when everything that follows from `nodes` ends in nodes whose ids are in `gone`."""
    stack, seen = list(nodes), set(gone)
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if len(seen) > len(gone) + 200 or any(id(t) in leaving for t in node.outputs):
            return False
        if any(isinstance(value, gs.Graph) for value in node.attrs.values()):
            return False
        stack += [n for t in node.outputs for n in t.outputs]
    return True
