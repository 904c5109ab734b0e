"""Follows an operand upstream, and a result downstream, through nodes that only move, scale or widen data.

Contract: each step's index map is built from the sizes and values of the scenario (`views.View`), so the composed map
from a candidate tensor to the operand is exact; which nodes a route is made of does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.views import View

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder

_RESHAPES = {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}
MOVES = _RESHAPES | {"Identity", "Dropout", "Transpose", "Expand", "Tile", "Slice", "Split", "Gather"}


@dataclass(frozen=True)
class Source:
    """A tensor that an operand is made of.

    Attributes:
        tensor: the candidate, of sizes `shape`.
        view: the operand (as the product reads it) as an index map of `tensor`.
        scale: factor between `tensor` and the operand, in float64.
        nodes: the nodes in between, operand first.
        widened: a Cast to a wider float lies in between.
    """

    tensor: gs.Tensor
    shape: tuple[int, ...]
    view: View
    scale: float
    nodes: tuple[gs.Node, ...]
    widened: bool


def is_standard(node: gs.Node) -> bool:
    """True for operators of the default domain whose attributes are all their own."""
    own = not any(isinstance(value, gs.Node.AttributeRef) for value in node.attrs.values())
    return own and (node.domain or "") in ("", "ai.onnx")


def sources(operand: gs.Tensor, folder: Folder) -> list[Source]:
    """All candidates for `operand`, the operand itself first, each next one further upstream."""
    shape = folder.shape(operand)
    if shape is None:
        return []
    found = [Source(operand, shape, View.contiguous(shape), 1.0, (), False)]
    steps: list[tuple[gs.Node, gs.Tensor, gs.Tensor]] = []
    tensor, scale, widened = operand, 1.0, False
    while tensor.inputs:
        node = tensor.inputs[0]
        if not is_standard(node):
            break
        factor = scale_step(node, folder)
        if factor is not None:
            source, by = factor
            scale *= by
        elif node.op == "Cast" and _widens(node, folder):
            source, widened = node.inputs[0], True
        elif node.op in MOVES:
            source = node.inputs[0]
        else:
            break
        steps.insert(0, (node, source, tensor))
        tensor = source
        view = _compose(steps, folder)
        if view is not None:
            found.append(
                Source(
                    tensor, folder.shape(tensor) or (), view, scale, tuple(n for n, _, _ in reversed(steps)), widened
                )
            )
    return found


def _compose(steps: list[tuple[gs.Node, gs.Tensor, gs.Tensor]], folder: Folder) -> View | None:
    shape = folder.shape(steps[0][1])
    view = View.contiguous(shape) if shape is not None else None
    for node, _, out in steps:
        if view is None:
            return None
        if node.op in MOVES:
            view = forward(node, out, view, folder)
    return view


def _widens(node: gs.Node, folder: Folder) -> bool:
    source, target = folder.dtype(node.inputs[0]), folder.dtype(node.outputs[0])
    if source is None or target is None:
        return False
    floats = ("float16", "bfloat16", "float32", "float64")
    return (
        source.name in floats
        and target.name in floats
        and source.itemsize <= target.itemsize
        and (source.itemsize < target.itemsize or source == target)
    )


def scale_step(node: gs.Node, folder: Folder) -> tuple[gs.Tensor, float] | None:
    """For a Mul or Div by one static number: the other input and the factor."""
    if node.op not in ("Mul", "Div") or not is_standard(node) or len(node.inputs) != 2:
        return None
    a, b = node.inputs
    number = folder.scalar(b) if folder.is_static(b) else None
    if number is not None and number != 0 and folder.shape(node.outputs[0]) == folder.shape(a):
        return a, number if node.op == "Mul" else 1.0 / number
    number = folder.scalar(a) if node.op == "Mul" and folder.is_static(a) else None
    if number is not None and folder.shape(node.outputs[0]) == folder.shape(b):
        return b, number
    return None


def forward(node: gs.Node, out: gs.Tensor, view: View, folder: Folder) -> View | None:
    """The index map of `out` when `view` is that of the node's first input; None when it is no such map."""
    shape = folder.shape(out)
    if shape is None:
        return None
    if node.op == "Identity":
        return view
    if node.op == "Dropout":
        return view if out is node.outputs[0] and not drops(node, folder) else None
    if node.op in _RESHAPES:
        return view.reshape(shape)
    if node.op == "Transpose":
        return view.transpose(node.attrs.get("perm", range(len(view.axes) - 1, -1, -1)))
    if node.op == "Expand":
        return view.expand(shape)
    if node.op == "Tile":
        return _tile(node, view, folder)
    if node.op == "Slice":
        return _slice(node, view, folder)
    if node.op == "Split":
        return _split(node, out, view, folder)
    if node.op == "Gather":
        return _gather(node, view, folder)
    return None


def drops(node: gs.Node, folder: Folder) -> bool:
    """True when a Dropout may really drop: its training_mode is on, or not known."""
    if len(node.inputs) < 3 or node.inputs[2].is_empty():
        return False
    mode = folder.value(node.inputs[2])
    return mode is None or bool(np.asarray(mode).reshape(-1)[0])


def _tile(node: gs.Node, view: View, folder: Folder) -> View | None:
    repeats = folder.value(node.inputs[1])
    if repeats is None:
        return None
    axes = tuple(((int(r), 0), *axis) for r, axis in zip(repeats, view.axes, strict=True))
    return View(axes, view.offset)


def _slice(node: gs.Node, view: View, folder: Folder) -> View | None:
    args = [folder.value(t) if not t.is_empty() else None for t in node.inputs[1:]]
    missing = [a is None and not t.is_empty() for a, t in zip(args, node.inputs[1:], strict=True)]
    if any(missing) or len(args) < 2 or args[0] is None or args[1] is None:
        return None
    starts, ends = args[0], args[1]
    axes = args[2] if len(args) > 2 and args[2] is not None else np.arange(len(starts))
    steps = args[3] if len(args) > 3 and args[3] is not None else np.ones(len(starts), np.int64)
    result: View | None = view
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if result is None:
            return None
        at = int(axis) % len(result.axes)
        picked = range(*slice(int(start), int(end), int(step)).indices(result.shape[at]))
        if len(picked) == 0 or step < 0:
            return None
        result = result.slice(at, picked.start, len(picked), picked.step)
    return result


def _split(node: gs.Node, out: gs.Tensor, view: View, folder: Folder) -> View | None:
    axis = int(node.attrs.get("axis", 0)) % len(view.axes)
    start = 0
    for tensor in node.outputs:
        shape = folder.shape(tensor)
        if shape is None:
            return None
        if tensor is out:
            return view.slice(axis, start, shape[axis])
        start += shape[axis]
    return None


def _gather(node: gs.Node, view: View, folder: Folder) -> View | None:
    indices = folder.value(node.inputs[1])
    if indices is None or indices.size == 0:
        return None
    axis = int(node.attrs.get("axis", 0)) % len(view.axes)
    flat = indices.reshape(-1).astype(np.int64)
    flat = np.where(flat < 0, flat + view.shape[axis], flat)
    repeat = int(np.argmax(flat != flat[0])) or len(flat)
    runs = flat.reshape(-1, repeat) if len(flat) % repeat == 0 else flat.reshape(-1, 1)
    heads = runs[:, 0]
    step = int(heads[1] - heads[0]) if len(heads) > 1 else 1
    if step < 1 or not (runs == heads[:, None]).all() or not (heads == heads[0] + step * np.arange(len(heads))).all():
        return None
    picked = view.slice(axis, int(heads[0]), len(heads), step)
    if picked is None:
        return None
    repeated: tuple[tuple[int, int], ...] = (*picked.axes[axis], (runs.shape[1], 0))
    rows = View((*picked.axes[:axis], repeated, *picked.axes[axis + 1 :]), picked.offset)
    return rows.reshape((*view.shape[:axis], *indices.shape, *view.shape[axis + 1 :]))
