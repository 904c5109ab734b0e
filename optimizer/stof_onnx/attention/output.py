"""Follows probabilities @ V downstream: the exporter's transpose and reshape disappear into the output layout.

Contract: the chosen tensor is, element for element, [B, H, Sq, Dv] (BHSD) or [B, Sq, H*Dv] (BSHD; also flattened to
rank 2) of the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_graphsurgeon as gs
from stof_onnx.attention.movement import MOVES, forward, is_standard
from stof_onnx.attention.readers import readers, vanish
from stof_onnx.attention.types import Layout
from stof_onnx.attention.views import View, reduce_axis

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder


@dataclass(frozen=True)
class Result:
    """A tensor that can take the node's output, and the nodes between the product (excluded) and it (included)."""

    tensor: gs.Tensor
    layout: Layout
    nodes: tuple[gs.Node, ...]
    rank: int  # 4 in BHSD; 3, or 2 for [B*Sq, H*Dv], in BSHD


def results(
    tensor: gs.Tensor, view: View | None, sizes: tuple[int, int, int, int], graph_outputs: set[int], folder: Folder
) -> list[Result]:
    """Candidates for the output, nearest first.

    Args:
        tensor, view: the core's result, over the flat [B, H, Sq, Dv].
        sizes: B, H, Sq, Dv.
        graph_outputs: ids of tensors that leave their graph.
    """
    batch, heads, seq, dim = sizes
    nodes: list[gs.Node] = []
    shape_readers: list[gs.Node] = []
    found = []
    while view is not None:
        layout = _layout(view, batch, heads, seq, dim)
        gone = {id(n) for n in nodes}
        if layout is not None and vanish(shape_readers, gone, graph_outputs):
            found.append(Result(tensor, layout, tuple(nodes), len(view.axes)))
        data, of_shape = readers(tensor)
        if id(tensor) in graph_outputs or len(data) != 1:
            break
        shape_readers += of_shape
        node = data[0]
        if not is_standard(node) or node.op not in MOVES or node.inputs[0] is not tensor:
            break
        nodes.append(node)
        tensor = node.outputs[0]
        view = forward(node, tensor, view, folder)
    return found


def _layout(view: View, batch: int, heads: int, seq: int, dim: int) -> Layout | None:
    if view.offset:
        return None
    if view.shape == (batch, heads, seq, dim) and _equal(view, View.contiguous(view.shape)):
        return Layout.BHSD
    if view.shape == (batch, seq, heads * dim):
        wanted = View((((batch, heads * seq * dim),), ((seq, dim),), ((heads, seq * dim), (dim, 1))))
        return Layout.BSHD if _equal(view, wanted) else None
    if view.shape == (batch * seq, heads * dim):
        flat = View((((batch, heads * seq * dim), (seq, dim)), ((heads, seq * dim), (dim, 1))))
        return Layout.BSHD if _equal(view, flat) else None
    return None


def _equal(a: View, b: View) -> bool:
    return all(reduce_axis(x) == reduce_axis(y) for x, y in zip(a.axes, b.axes, strict=True))
