"""Finds which axes of Q, K and V are batch, heads and sequence, and undoes expanded K/V (GQA, MQA).

Contract: a placement is accepted only when the index map that the layout means equals the map the graph computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from stof_onnx.attention.movement import Source
from stof_onnx.attention.types import Layout
from stof_onnx.attention.views import View, reduce_axis


@dataclass(frozen=True)
class Placed:
    """`source` lies in `layout` with these sizes; `heads` of them serve `batch_heads / batch` query heads."""

    source: Source
    layout: Layout
    batch: int
    heads: int
    query_heads: int
    seq: int
    dim: int


def place(source: Source, view: View | None) -> list[Placed]:
    """Every layout in which `source` is read as `view` = [batch..., rows, inner] by the product."""
    if view is None or view.offset != 0:
        return []
    total = prod(view.shape[:-2])
    seq, dim = view.shape[-2:]
    shape = source.shape
    options: list[tuple[Layout, int, int]] = []
    if len(shape) == 4:
        options = [(Layout.BHSD, shape[0], shape[1]), (Layout.BSHD, shape[0], shape[2])]
    elif len(shape) == 3 and shape[2] % dim == 0:
        options = [(Layout.BSHD, shape[0], shape[2] // dim)]
    found = []
    for layout, batch, heads in options:
        if prod(shape) != batch * heads * seq * dim or total % batch or (total // batch) % heads:
            continue
        repeat = total // batch // heads
        if layout is Layout.BHSD:
            step_b, step_h, step_s = heads * seq * dim, seq * dim, dim
        else:
            step_b, step_h, step_s = seq * heads * dim, dim, heads * dim
        if len(shape) == 4 and shape[2 if layout is Layout.BHSD else 1] != seq:
            continue
        if (
            view.merged(0, len(view.axes) - 2) == reduce_axis(((batch, step_b), (heads, step_h), (repeat, 0)))
            and view.merged(len(view.axes) - 2, len(view.axes) - 1) == reduce_axis(((seq, step_s),))
            and view.merged(len(view.axes) - 1, len(view.axes)) == reduce_axis(((dim, 1),))
        ):
            found.append(Placed(source, layout, batch, heads, total // batch, seq, dim))
    return found
