"""Chooses where Q, K, V and the output are cut out of the graph, so that what only moves data disappears.

Contract: whatever is chosen holds the same numbers as the operands of the core, in a layout of the contract, at every
size looked at; a narrower float is widened ahead of the node by a Cast of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.heads import Placed, place
from stof_onnx.attention.movement import sources
from stof_onnx.attention.output import Result, results
from stof_onnx.attention.products import Product
from stof_onnx.attention.types import AttentionMatch, Layout, NewNode
from stof_onnx.attention.views import View
from stof_onnx.graph.shapes import elem_type

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder

Canonical = Callable[[View], View | None]


@dataclass(frozen=True)
class Core:
    """An attention by its operands: each with the way its index map becomes [batch..., rows, inner]."""

    q: gs.Tensor
    k: gs.Tensor
    v: gs.Tensor
    output: gs.Tensor
    q_view: Canonical
    k_view: Canonical
    v_view: Canonical
    output_view: Callable[[int, int], View]  # (Sq, Dv) -> `output` over the flat [batch..., Sq, Dv]


@dataclass(frozen=True)
class Choice:
    """One way to cut Q, K, V and the output out of the graph; `dtype` is that of the node."""

    q: Placed
    k: Placed
    v: Placed
    result: Result
    dtype: np.dtype
    casts: int

    @property
    def key(self) -> tuple[object, ...]:
        """What must be the same at every size."""
        placed = [(id(p.source.tensor), p.layout, p.heads, p.dim, p.source.scale) for p in (self.q, self.k, self.v)]
        return (*placed, self.q.query_heads, id(self.result.tensor), self.result.layout)

    @property
    def gain(self) -> int:
        """Nodes that disappear around the core, less those that are added."""
        absorbed = sum(len(p.source.nodes) for p in (self.q, self.k, self.v)) + len(self.result.nodes)
        return absorbed - 2 * self.casts - (self.result.rank == 2)


def of_products(above: Product, below: Product) -> Core:
    """The core of Q @ K^T and probabilities @ V."""
    return Core(
        above.left,
        above.right,
        below.right,
        below.node.outputs[0],
        above.left_view,
        above.right_view,
        below.values_view,
        lambda seq, dim: View.contiguous((*below.batch, seq, dim)).transpose(below.perm),
    )


def choices(core: Core, leaving: set[int], folder: Folder) -> Iterator[Choice]:
    """Every consistent way to read Q, K, V and the output."""
    queries = [p for s in sources(core.q, folder) for p in place(s, core.q_view(s.view))]
    keys = [p for s in sources(core.k, folder) for p in place(s, core.k_view(s.view))]
    values = [p for s in sources(core.v, folder) if s.scale == 1.0 for p in place(s, core.v_view(s.view))]
    for q in queries:
        if q.heads != q.query_heads:
            continue
        fitting = [v for v in values if (v.batch, v.query_heads) == (q.batch, q.query_heads)]
        ends = [
            (v, end)
            for v in fitting
            for end in results(
                core.output, core.output_view(q.seq, v.dim), (q.batch, q.query_heads, q.seq, v.dim), leaving, folder
            )
        ]
        for k in keys:
            if (k.batch, k.query_heads, k.dim) != (q.batch, q.query_heads, q.dim):
                continue
            for v, end in ends:
                if v.heads == k.heads and v.seq == k.seq:
                    choice = _typed(q, k, v, end, folder)
                    if choice is not None:
                        yield choice


def _typed(q: Placed, k: Placed, v: Placed, end: Result, folder: Folder) -> Choice | None:
    dtype = folder.dtype(end.tensor)
    if dtype is None:
        return None
    casts = 0
    for placed in (q, k, v):
        own = folder.dtype(placed.source.tensor)
        if own == dtype:
            continue
        if own is None or own.name not in ("float16", "bfloat16") or dtype != np.float32:
            return None
        casts += 1
    return Choice(q, k, v, end, dtype, casts)


def widened(placed: Placed, dtype: np.dtype, folder: Folder, name: str) -> tuple[gs.Tensor, tuple[NewNode, ...]]:
    """The tensor to hand to the node: the source, or a Cast of it to `dtype`."""
    tensor = placed.source.tensor
    if folder.dtype(tensor) == dtype:
        return tensor, ()
    wide = gs.Variable(f"{name}/stof_wide", dtype=dtype, shape=tensor.shape)
    return wide, (NewNode("Cast", (tensor,), (wide,), {"to": elem_type(dtype)}),)


def of_match(match: AttentionMatch, folder: Folder) -> Core | None:
    """The core of an operator that is an attention by itself; None where a size is not known."""
    shapes = [folder.shape(t) for t in (match.q, match.k, match.v)]
    if any(s is None for s in shapes) or folder.shape(match.output) is None:
        return None
    heads, kv_heads = match.num_heads, match.num_kv_heads
    batch = (shapes[0] or (0,))[0]

    def output_view(seq: int, dim: int) -> View:
        if match.o_layout is Layout.BHSD:
            return View.contiguous((batch, heads, seq, dim))
        return View((((batch, heads * seq * dim),), ((seq, dim),), ((heads, seq * dim), (dim, 1))))

    return Core(
        match.q,
        match.k,
        match.v,
        match.output,
        lambda view: _heads_first(view, match.q_layout, heads, 1),
        lambda view: _heads_first(view, match.k_layout, kv_heads, heads // kv_heads),
        lambda view: _heads_first(view, match.v_layout, kv_heads, heads // kv_heads),
        output_view,
    )


def _heads_first(view: View, layout: Layout, heads: int, repeat: int) -> View | None:
    """[batch, heads, repeat, rows, inner] of an operand in `layout`."""
    four: View | None = view
    if layout is Layout.BSHD:
        if len(view.axes) == 3:
            batch, seq, width = view.shape
            four = view.reshape((batch, seq, heads, width // heads))
        four = four.transpose((0, 2, 1, 3)) if four is not None else None
    if four is None or len(four.axes) != 4:
        return None
    return View((*four.axes[:2], ((repeat, 0),), *four.axes[2:]), four.offset)


def applied(match: AttentionMatch, choice: Choice) -> AttentionMatch:
    """`match` with its operands taken from further up and its output from further down."""
    q, k, v = choice.q, choice.k, choice.v
    return replace(
        match,
        q=q.source.tensor,
        k=k.source.tensor,
        v=v.source.tensor,
        output=choice.result.tensor,
        q_layout=q.layout,
        k_layout=k.layout,
        v_layout=v.layout,
        o_layout=choice.result.layout,
        output_rank=choice.result.rank,
        num_kv_heads=k.heads,
        scale=match.scale * q.source.scale * k.source.scale,
        nodes=(*match.nodes, *choice.result.nodes),
        ranks=(len(q.source.shape), len(k.source.shape), len(v.source.shape)),
    )
