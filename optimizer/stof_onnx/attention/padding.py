"""Run-time key padding: finds the [B, Skv] tensor inside mask terms and proves that they depend on it key by key.

Contract: a `Padding` is returned only when every run-time term at [b, h, q, k] is a function of static values and of
entry [b, k] of one tensor. What that function is (which value hides a key) is settled by evaluating both cases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.movement import MOVES, forward, is_standard
from stof_onnx.attention.types import ScoreSite, ScoreTerm
from stof_onnx.attention.views import Axis, View, reduce_axis
from stof_onnx.graph.shapes import subgraphs_of

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder

_ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Div", "Equal", "Floor", "Greater", "GreaterOrEqual", "IsNaN", "Less",
    "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Relu", "Round", "Sign", "Sub", "Sum",
    "Where", "Xor", "CastLike", "IsInf", "Reciprocal", "BitwiseAnd", "BitwiseOr", "BitwiseNot", "Exp", "Log", "Sqrt",
}  # fmt: skip


@dataclass(frozen=True)
class Padding:
    """`tensor` holds one entry a batch entry and key; `boolean` when it can hold nothing but 0 and 1.

    `root` is the tensor above it with the same entries that are zero, at best an input of the model.
    """

    tensor: gs.Tensor
    root: gs.Tensor
    shape: tuple[int, ...]
    dtype: np.dtype
    boolean: bool

    def filled(self, value: int) -> tuple[tuple[gs.Tensor, np.ndarray], ...]:
        """Feeds with every entry set to `value`."""
        return ((self.tensor, np.full(self.shape, value, self.dtype)),)


def runtime_tensors(terms: tuple[ScoreTerm, ...], folder: Folder) -> list[tuple[ScoreTerm, gs.Tensor]]:
    """The term tensors whose values are known only at run time."""
    return [
        (term, tensor)
        for term in terms
        for tensor in (term.tensor, term.fill_tensor)
        if tensor is not None and not folder.is_static(tensor)
    ]


def paddings(terms: tuple[ScoreTerm, ...], site: ScoreSite, folder: Folder) -> Iterator[Padding]:
    """Every tensor that could be the key padding of all run-time terms, nearest to the scores first."""
    runtime = runtime_tensors(terms, folder)
    if not runtime:
        return
    shared: list[gs.Tensor] | None = None
    for _, tensor in runtime:
        above = _upstream(tensor, folder)
        ids = {id(t) for t in above}
        shared = above if shared is None else [t for t in shared if id(t) in ids]
    for tensor in shared or []:
        shape, dtype = folder.shape(tensor), folder.dtype(tensor)
        if shape is None or dtype is None or not _is_key_shape(shape, site):
            continue
        if all(_depends_by_key(tensor, shape, term, target, site, folder) for term, target in runtime):
            root, boolean = _root(tensor, site, folder)
            kind = folder.dtype(root)
            if root.inputs and (kind is None or kind.kind not in "iub"):
                continue  # numbers that the model computes need not be 0 and 1
            yield Padding(tensor, root, shape, dtype, boolean)


def _is_key_shape(shape: tuple[int, ...], site: ScoreSite) -> bool:
    return (
        len(shape) >= 2
        and shape[0] == site.batch
        and shape[-1] == site.seq_kv
        and (int(np.prod(shape)) == site.batch * site.seq_kv)
    )


def _root(tensor: gs.Tensor, site: ScoreSite, folder: Folder) -> tuple[gs.Tensor, bool]:
    """The highest tensor with the same entries up to a Cast that keeps zeros, and whether a bool lies on the way."""
    boolean = folder.dtype(tensor) == np.bool_
    while tensor.inputs and tensor.inputs[0].op in ("Cast", "Unsqueeze", "Squeeze", "Reshape", "Identity"):
        above = tensor.inputs[0].inputs[0]
        shape, kind = folder.shape(above), folder.dtype(above)
        if shape is None or kind is None or kind.kind not in "iub" or not _is_key_shape(shape, site):
            break
        tensor, boolean = above, boolean or kind == np.bool_
    return tensor, bool(boolean)


def _upstream(tensor: gs.Tensor, folder: Folder) -> list[gs.Tensor]:
    """`tensor` and the run-time tensors above it, breadth first, a bounded number."""
    queue = deque([tensor])
    seen: set[int] = set()
    order: list[gs.Tensor] = []
    while queue and len(order) < 400:
        current = queue.popleft()
        if id(current) in seen or current.is_empty() or folder.is_static(current):
            continue
        seen.add(id(current))
        order.append(current)
        if current.inputs:
            queue.extend(current.inputs[0].inputs)
    return order


def _depends_by_key(
    source: gs.Tensor,
    shape: tuple[int, ...],
    term: ScoreTerm,
    target: gs.Tensor,
    site: ScoreSite,
    folder: Folder,
) -> bool:
    """True when `target` at [b, h, q, k] reads `source` only at [b, k]."""
    view = _trace(source, shape, target, folder)
    if view is None:
        return False
    scores = (site.batch, site.heads, site.seq_q, site.seq_kv)
    if term.axes is not None:
        axes: list[Axis] = [((1, 0),)] * 4
        for axis, factors in zip(term.axes, view.axes, strict=True):
            axes[axis] = factors
        full: View | None = View(tuple(axes), view.offset).expand(scores)
    else:
        wide = folder.shape(term.view) if term.view is not None else scores
        full = view.expand(wide) if wide is not None else None
        full = full.reshape(scores) if full is not None else None
    if full is None or full.offset:
        return False
    wanted = View((((site.batch, site.seq_kv),), ((site.heads, 0),), ((site.seq_q, 0),), ((site.seq_kv, 1),)))
    return all(reduce_axis(a) == reduce_axis(b) for a, b in zip(full.axes, wanted.axes, strict=True))


def _trace(source: gs.Tensor, shape: tuple[int, ...], target: gs.Tensor, folder: Folder) -> View | None:
    """The index map of `target` over `source`, through moves and elementwise operators; None if there is none."""
    views: dict[int, View | None] = {id(source): View.contiguous(shape)}
    stack = [target]
    while stack:
        tensor = stack[-1]
        if id(tensor) in views:
            stack.pop()
            continue
        if not tensor.inputs or subgraphs_of(tensor.inputs[0]) or not is_standard(tensor.inputs[0]):
            return None
        node = tensor.inputs[0]
        reads = list(node.inputs)
        live = [t for t in reads if not t.is_empty() and not folder.is_static(t)]
        waiting = [t for t in live if id(t) not in views]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        view = _through(node, tensor, reads, live, views, folder)
        if view is None:
            return None
        views[id(tensor)] = view
    return views[id(target)]


def _through(
    node: gs.Node,
    out: gs.Tensor,
    reads: list[gs.Tensor],
    live: list[gs.Tensor],
    views: dict[int, View | None],
    folder: Folder,
) -> View | None:
    shape = folder.shape(out)
    if shape is None or not live:
        return None
    found = [views[id(t)] for t in live]
    if node.op in _ELEMENTWISE:
        wide = [v.expand(shape) if v is not None else None for v in found]
        first = wide[0]
        if first is None or any(v is None or v.reduced() != first.reduced() for v in wide):
            return None
        return first
    if live != [reads[0]] or found[0] is None:
        return None
    if node.op == "GatherND":
        return _gather_nd(node, found[0], folder)
    if node.op in MOVES:
        return forward(node, out, found[0], folder)
    return None


def _gather_nd(node: gs.Node, view: View, folder: Folder) -> View | None:
    """GatherND with known indices that step evenly along every axis of the result."""
    indices = folder.value(node.inputs[1])
    depth = indices.shape[-1] if indices is not None else 0
    if indices is None or node.attrs.get("batch_dims", 0) or depth != len(view.axes):
        return None
    strides = []
    for factors in view.axes:
        reduced = reduce_axis(factors)
        if len(reduced) > 1:
            return None
        strides.append(reduced[0][1] if reduced else 0)
    wrapped = np.where(indices < 0, indices + np.asarray(view.shape), indices)
    flat = (wrapped * np.asarray(strides)).sum(axis=-1)
    offset = int(flat.reshape(-1)[0])
    axes, rebuilt = [], np.asarray(offset)
    for axis, size in enumerate(flat.shape):
        line = flat[tuple(slice(None) if i == axis else 0 for i in range(flat.ndim))]
        step = int(line[1] - line[0]) if size > 1 else 0
        axes.append(((size, step),))
        rebuilt = rebuilt[..., None] + np.arange(size) * step
    if not np.array_equal(rebuilt.reshape(flat.shape), flat):
        return None
    return View(tuple(axes), view.offset + offset)
