"""From the softmax up to Q @ K^T: scale, softcap and the terms of mask recovery.

Contract: every node between the product and the softmax is accounted for exactly once, or the walk stops with the node
that it can not express. Which input of an Add or Mul carries the scores is decided by where a product of two run-time
operands is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.movement import drops, is_standard
from stof_onnx.attention.products import Product, in_place, is_product, read_product
from stof_onnx.attention.types import ScoreTerm
from stof_onnx.graph.shapes import np_dtype

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder

_RESHAPES = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Expand"}
_SAME = {"Identity", "Dropout"}
_COMBINE = {"Add", "Sub", "Mul", "Div", "Where", "Max", "Sum"}
_DEPTH = 40


@dataclass(frozen=True)
class Stop:
    """Why a walk ended: the sentence of a refusal and the node that stopped it."""

    reason: str
    node: gs.Node | None = None
    depth: int = 0
    harmless: bool = False  # there is no attention here


@dataclass(frozen=True)
class Step:
    """One node on the way: its scores input and output."""

    node: gs.Node
    source: gs.Tensor
    out: gs.Tensor


@dataclass(frozen=True)
class Scores:
    """What lies between Q @ K^T and the softmax."""

    product: Product
    scale: float
    softcap: float
    terms: tuple[ScoreTerm, ...]
    nodes: tuple[gs.Node, ...]  # product first
    tensors: tuple[gs.Tensor, ...]  # outputs of `nodes`, softmax input last


def read_scores(softmax_input: gs.Tensor, folder: Folder) -> Scores | Stop:
    """Walks up from the softmax input."""
    path = _climb(softmax_input, folder, 0)
    if isinstance(path, Stop):
        return path
    product, steps = path
    return _Interpreter(product, folder).run(steps)


def _climb(tensor: gs.Tensor, folder: Folder, depth: int) -> tuple[Product, list[Step]] | Stop:
    if not tensor.inputs:
        return Stop(f"the scores come from '{tensor.name}', which no node of this graph makes", None, depth)
    node = tensor.inputs[0]
    if depth > _DEPTH:
        return Stop("no product of Q and K found", node, depth)
    if is_product(node):
        return _core(node, folder, depth)
    if not is_standard(node):
        return Stop(f"{node.domain}::{node.op} between the product and the softmax", node, depth)
    if node.op in _SAME | _RESHAPES | {"Cast", "Tanh"}:
        choices = [node.inputs[0]]
    elif node.op in _COMBINE:
        choices = [t for t in node.inputs if not t.is_empty() and not folder.is_static(t)]
        if node.op == "Where":
            choices = [t for t in choices if t is not node.inputs[0]]
        if node.op == "Div":
            choices = [t for t in choices if t is node.inputs[0]]
    else:
        return Stop(f"{node.op} between the product and the softmax", node, depth)
    found: list[tuple[Product, list[Step]]] = []
    stops: list[Stop] = []
    for choice in choices:
        result = _climb(choice, folder, depth + 1)
        if isinstance(result, Stop):
            stops.append(result)
        else:
            found.append((result[0], [*result[1], Step(node, choice, tensor)]))
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        return Stop(f"{node.op} joins two products of run-time tensors", node, depth)
    return max(stops, key=lambda s: s.depth) if stops else Stop("the softmax input is known offline", node, depth)


def _core(node: gs.Node, folder: Folder, depth: int) -> tuple[Product, list[Step]] | Stop:
    product = read_product(node, folder)
    if product is None:
        return Stop(f"{node.op} is not one matrix product with known sizes", node, depth)
    if folder.is_static(product.right) or isinstance(product.left, gs.Constant):
        return Stop("the scores come from a product with a constant", node, depth, harmless=True)
    if not in_place(product):
        return Stop(f"{node.op} does not give [..., query, key]", node, depth)
    return product, []


@dataclass
class _Interpreter:
    """Turns steps into scale, softcap and terms."""

    product: Product
    folder: Folder
    scale: float = 1.0
    softcap: float = 0.0
    tanh: bool = False
    terms: list[ScoreTerm] = field(default_factory=list)

    def run(self, steps: list[Step]) -> Scores | Stop:
        self.scale = self.product.alpha
        self.core = self.product.node.outputs[0]
        self.shape = self.folder.shape(self.core)
        if self.shape is None:
            return Stop("the sizes of the scores are not known", self.product.node)
        for step in steps:
            stop = self._step(step)
            if stop is not None:
                return stop
        if self.tanh:
            self._end_tanh(1.0)
        return Scores(
            self.product,
            self.scale,
            self.softcap,
            tuple(self.terms),
            (self.product.node, *(s.node for s in steps)),
            (self.core, *(s.out for s in steps)),
        )

    def _step(self, step: Step) -> Stop | None:
        node, op = step.node, step.node.op
        shape = self.folder.shape(step.out)
        dtype = self.folder.dtype(step.out)
        if shape is None or dtype is None:
            return Stop("the sizes of the scores are not known", node)
        if op == "Dropout" and (drops(node, self.folder) or step.out is not node.outputs[0]):
            return Stop("Dropout in training mode", node)
        if op in _SAME:
            return None
        if op in _RESHAPES:
            return self._reshape(node, shape)
        if op == "Cast":
            self.terms.append(ScoreTerm("cast", np_dtype(int(node.attrs["to"])), node=node))
            return None
        if op == "Tanh":
            if self._masked():
                return Stop("softcap after a mask or bias", node)
            if self.softcap:
                return Stop("two softcaps", node)
            self.tanh = True
            return None
        if int(np.prod(shape)) != int(np.prod(self.folder.shape(step.source) or ())):
            return Stop(f"{op} broadcasts the scores", node)
        if op in ("Mul", "Div"):
            return self._multiply(step, dtype)
        if self.tanh:
            self._end_tanh(1.0)
        if op == "Add" or op == "Sub":
            first = step.source is node.inputs[0]
            if op == "Sub" and not first:
                return Stop("the scores are subtracted", node)
            other = node.inputs[1] if first else node.inputs[0]
            self.terms.append(ScoreTerm("add", dtype, other, negate=op == "Sub", view=step.out, node=node))
            return None
        if op == "Where":
            return self._where(step, dtype)
        return Stop(f"{op} between the product and the softmax", node)

    def _masked(self) -> bool:
        self.terms = [t for t in self.terms if not self._adds_nothing(t)]
        return any(t.kind != "cast" for t in self.terms)

    def _adds_nothing(self, term: ScoreTerm) -> bool:
        """Whether a term is a static 0 at every size."""
        if term.kind != "add" or term.tensor is None or not self.folder.is_static(term.tensor):
            return False
        folders = (self.folder,) if self.folder.family is None else self.folder.family.folders()
        values = (f.value(term.tensor) for f in folders)
        return all(v is not None and not v.any() for v in values)

    def _end_tanh(self, factor: float) -> None:
        # tanh(s * x) * c = c * tanh((s * c) * x / c)
        self.softcap, self.scale, self.tanh = factor, self.scale * factor, False

    def _reshape(self, node: gs.Node, shape: tuple[int, ...]) -> Stop | None:
        assert self.shape is not None
        if len(shape) < 2 or shape[-2:] != self.shape[-2:] or np.prod(shape) != np.prod(self.shape):
            return Stop(f"{node.op} moves the query or key axis of the scores", node)
        return None

    def _multiply(self, step: Step, dtype: np.dtype) -> Stop | None:
        node = step.node
        first = step.source is node.inputs[0]
        other = node.inputs[1] if first else node.inputs[0]
        number = self.folder.scalar(other) if self.folder.is_static(other) else None
        if number is None:
            if node.op == "Div":
                return Stop("the scores are divided by a tensor that is not one known number", node)
            if self.tanh:
                return Stop("softcap with a tensor", node)
            if self.folder.is_static(other) and self.folder.dtype(other) is not None:
                other_value = self.folder.value(other)
                if other_value is not None and not np.isin(other_value, (0, 1)).all():
                    return Stop("the scale differs between heads or positions", node)
            self.terms.append(ScoreTerm("mul", dtype, other, view=step.out, node=node))
            return None
        if number == 0 or not np.isfinite(number):
            return Stop(f"the scores are scaled by {number}", node)
        factor = number if node.op == "Mul" else 1.0 / number
        if self.tanh:
            self._end_tanh(factor)
        elif self._masked() or self.softcap:
            if self.softcap and not self._masked():
                return Stop("a factor between softcap and mask", node)
            self.terms.append(ScoreTerm("mul", dtype, fill=factor, node=node))
        else:
            self.scale *= factor
        return None

    def _where(self, step: Step, dtype: np.dtype) -> Stop | None:
        node = step.node
        condition, yes, no = node.inputs
        keep = step.source is yes
        fill = no if keep else yes
        if not self.folder.is_static(fill):
            return Stop("Where replaces scores by values known only at run time", node)
        number = self.folder.scalar(fill)
        self.terms.append(
            ScoreTerm(
                "where",
                dtype,
                condition,
                keep=keep,
                fill=number,
                fill_tensor=None if number is not None else fill,
                view=step.out,
                node=node,
            )
        )
        return None
