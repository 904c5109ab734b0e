"""Dynamic sequence length: may what was encoded at the largest size serve every smaller one?

Contract: yes only when the entry of every term at [q, k] does not depend on the sizes, proven from the graph (built
from operators whose entries do not change when an axis grows) or, for few lengths, by evaluating each of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.movement import is_standard
from stof_onnx.attention.terms import play, term_values
from stof_onnx.attention.types import Refusal, ScoreSite, ScoreTerm
from stof_onnx.graph.model import node_label
from stof_onnx.graph.shapes import node_constant, subgraphs_of

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder
    from stof_onnx.graph.scenarios import Family

Feeds = tuple[tuple[gs.Tensor, np.ndarray], ...]
_MAX_LENGTHS = 512
_ENTRYWISE = {
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Div", "Equal", "Exp", "Floor", "Greater",
    "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or",
    "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sqrt", "Sub", "Sum", "Tanh", "Where", "Xor",
    "Identity",
}  # fmt: skip
_POLYNOMIAL = {"Add", "Sub", "Neg", "Cast", "Gather", "Concat", "Unsqueeze", "Squeeze", "Slice", "Reshape", "Identity"}


class Growth(enum.IntEnum):
    """How the entries of a tensor change when sequence axes grow."""

    UNIFORM = 0  # one value everywhere, whatever the size
    STABLE = 1  # the entry at an index never changes
    SIZE = 2  # a linear function of sizes
    UNKNOWN = 3


@dataclass(frozen=True)
class _Fact:
    growth: Growth
    low: float = -np.inf  # no entry is below
    node: gs.Node | None = None  # what made it UNKNOWN


def check_lengths(
    terms: tuple[ScoreTerm, ...],
    site: ScoreSite,
    shown: Feeds,
    allowed: np.ndarray,
    bias: np.ndarray | None,
    folder: Folder,
) -> Refusal | None:
    """None when `allowed` and `bias`, made at the largest sizes, hold at all sizes the inputs may have.

    Args:
        terms, site, folder: as in `recover`.
        shown: the padding tensor, with every key shown.
        allowed, bias: what was found at the largest sizes.
    """
    family = folder.family
    if family is None or not family.probes:
        return None
    sizes = site.probe_sizes
    labels = tuple(dict.fromkeys(node_label(t.node) for t in terms if t.node is not None))
    if len(sizes) != len(family.probes):
        return Refusal("how the scores depend on the dynamic axes is not known", labels, site.name)
    trivial = bool(allowed.all()) and bias is None
    if any(s[0] != site.batch for s in sizes) and max(allowed.shape[0], 1 if bias is None else bias.shape[0]) > 1:
        return Refusal("the mask differs between batch entries, and the batch size is dynamic", labels, site.name)
    moving = [i for i, s in enumerate(sizes) if s[2:] != (site.seq_q, site.seq_kv)]
    if not moving:
        return None
    free = any(family.unbounded[i] for i in moving)
    worst = _Growths(folder, family, shown).of_terms(terms)
    if worst.growth is Growth.UNIFORM and trivial:
        return None
    if free:
        return Refusal("nothing bounds the sequence length: give --shape with its range", labels, site.name)
    problem = _compare(family.probes, terms, site, shown, allowed, bias, list(sizes))
    if problem is not None:
        return Refusal(problem, labels, site.name)
    if worst.growth <= Growth.STABLE:
        return None
    lengths = family.lengths()
    square = site.seq_q == site.seq_kv == max(lengths, default=0) and all(s[2] == s[3] for s in sizes)
    if not square or len(lengths) > _MAX_LENGTHS:
        stopper = (node_label(worst.node),) if worst.node is not None else labels
        return Refusal(
            "the mask of a shorter sequence may not be the leading part of the largest one", stopper, site.name
        )
    for length in lengths:
        problem = _compare(
            (family.at(length),), terms, site, shown, allowed, bias, [(site.batch, site.heads, length, length)]
        )
        if problem is not None:
            return Refusal(problem, labels, site.name)
    return None


def _compare(
    folders: tuple[Folder, ...],
    terms: tuple[ScoreTerm, ...],
    site: ScoreSite,
    shown: Feeds,
    allowed: np.ndarray,
    bias: np.ndarray | None,
    sizes: list[tuple[int, int, int, int]],
) -> str | None:
    for folder, (batch, heads, s_q, s_kv) in zip(folders, sizes, strict=True):
        if s_q > site.seq_q or s_kv > site.seq_kv:
            continue
        small = replace(site, batch=batch, heads=heads, seq_q=s_q, seq_kv=s_kv)
        feeds = tuple((t, np.full(folder.shape(t) or (), a.reshape(-1)[0], a.dtype)) for t, a in shown)
        for band in play(term_values(terms, small, folder, feeds), small):
            here = ~band.masked
            there = allowed[:, :, band.q0 : band.q1, :s_kv]
            if not _equal(here, there):
                return f"the mask at {s_q} x {s_kv} is not the leading part of the one at {site.seq_q} x {site.seq_kv}"
            value = np.where(here, band.added, 0)
            wanted = np.zeros((1, 1, 1, 1)) if bias is None else bias[:, :, band.q0 : band.q1, :s_kv]
            if not _equal(value, wanted):
                return f"the bias at {s_q} x {s_kv} is not the leading part of the one at {site.seq_q} x {site.seq_kv}"
    return None


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a == b).all())


class _Growths:
    """Classifies tensors by how their entries change with the sizes."""

    def __init__(self, folder: Folder, family: Family, shown: Feeds) -> None:
        self.folder, self.family = folder, family
        self.facts: dict[int, _Fact] = {id(folder.resolve(t)): _Fact(Growth.UNIFORM) for t, _ in shown}

    def of_terms(self, terms: tuple[ScoreTerm, ...]) -> _Fact:
        """The worst of all terms."""
        worst = _Fact(Growth.UNIFORM)
        for term in terms:
            for tensor in (term.tensor, term.fill_tensor):
                if tensor is not None:
                    fact = self._of(self.folder.resolve(tensor))
                    worst = max(worst, fact, key=lambda f: f.growth)
            if term.build is not None:
                built = _Fact(Growth.STABLE if term.stable else Growth.UNKNOWN, node=term.node)
                worst = max(worst, built, key=lambda f: f.growth)
        return worst

    def _of(self, target: gs.Tensor) -> _Fact:
        stack = [target]
        while stack:
            tensor = stack[-1]
            if id(tensor) in self.facts:
                stack.pop()
                continue
            if isinstance(tensor, gs.Constant) or not tensor.inputs:
                self.facts[id(tensor)] = self._leaf(tensor)
                continue
            node = tensor.inputs[0]
            if node.op in ("Shape", "Size", "Constant", "ConstantOfShape"):
                waiting = []
            else:
                reads = [self.folder.resolve(t) for t in node.inputs if not t.is_empty()]
                waiting = [t for t in reads if id(t) not in self.facts]
            if waiting:
                stack += waiting
                continue
            self.facts[id(tensor)] = self._node(node, tensor)
        return self.facts[id(target)]

    def _leaf(self, tensor: gs.Tensor) -> _Fact:
        if not isinstance(tensor, gs.Constant):
            return _Fact(Growth.UNKNOWN)
        value = self.folder.shapes.value(tensor)
        return _constant(value)

    def _node(self, node: gs.Node, out: gs.Tensor) -> _Fact:
        if node.op == "Constant":
            return _constant(node_constant(node))
        if subgraphs_of(node) or not is_standard(node):
            return _Fact(Growth.UNKNOWN, node=node)
        reads = [self.folder.resolve(t) for t in node.inputs]
        facts = [self.facts.get(id(t), _Fact(Growth.UNIFORM)) for t in reads]
        fact = self._rule(node, out, reads, facts)
        if fact.growth is Growth.SIZE and self._same_everywhere(out):
            value = self.folder.shapes.value(out)
            return _constant(value)
        if fact.growth is Growth.UNKNOWN and fact.node is None:
            blamed = next((f.node for f in facts if f.node is not None), node)
            return _Fact(Growth.UNKNOWN, node=blamed)
        return fact

    def _same_everywhere(self, tensor: gs.Tensor) -> bool:
        """A linear function of the sizes that agrees in scenarios whose sizes all differ is constant."""
        values = [f.shapes.value(tensor) for f in self.family.folders()]
        first = values[0]
        return first is not None and all(v is not None and np.array_equal(first, v) for v in values)

    def _fixed(self, tensor: gs.Tensor, axis: int) -> bool:
        shapes = [f.shape(tensor) for f in self.family.folders()]
        return all(s is not None and shapes[0] is not None and s[axis] == shapes[0][axis] for s in shapes)

    def _rule(self, node: gs.Node, out: gs.Tensor, reads: list[gs.Tensor], facts: list[_Fact]) -> _Fact:
        op = node.op
        unknown = _Fact(Growth.UNKNOWN)
        if op in ("Shape", "Size"):
            return _Fact(Growth.SIZE)
        if op == "ConstantOfShape":
            return _Fact(Growth.UNIFORM)
        if op == "Range":
            if facts[0].growth <= Growth.STABLE and facts[2].growth <= Growth.STABLE:
                start, step = self.folder.scalar(reads[0]), self.folder.scalar(reads[2])
                return _Fact(Growth.STABLE, start if start is not None and (step or 0) > 0 else -np.inf)
            return unknown
        data = facts[0] if facts else _Fact(Growth.UNIFORM)
        if op in ("Expand", "Unsqueeze", "Squeeze", "Transpose", "Tile") and data.growth <= Growth.STABLE:
            if op == "Tile" and data.growth is not Growth.UNIFORM:
                return unknown
            return data
        if op == "Reshape" and data.growth <= Growth.STABLE:
            return data if data.growth is Growth.UNIFORM or self._only_units(reads[0], out) else unknown
        if op in ("Slice", "Gather", "GatherND", "Concat", "Split", "Trilu", "CumSum", "EyeLike"):
            moved = self._selects(node, out, reads, facts)
            if moved is not None:
                return moved
        if op in _ENTRYWISE:
            worst = max((f.growth for f in facts), default=Growth.UNIFORM)
            if worst <= Growth.STABLE:
                return self._entrywise(node, reads, facts, worst)
        if op in _POLYNOMIAL and all(f.growth in (Growth.SIZE, Growth.STABLE, Growth.UNIFORM) for f in facts):
            return _Fact(Growth.SIZE)
        if (
            op == "Mul"
            and sum(f.growth is Growth.SIZE for f in facts) == 1
            and all(f.growth <= Growth.SIZE for f in facts)
        ):
            return _Fact(Growth.SIZE)
        return unknown

    def _entrywise(self, node: gs.Node, reads: list[gs.Tensor], facts: list[_Fact], worst: Growth) -> _Fact:
        low = facts[0].low if node.op in ("Cast", "Identity") else -np.inf
        if node.op in ("GreaterOrEqual", "Greater", "LessOrEqual", "Less") and len(reads) == 2:
            big, small = (0, 1) if node.op.startswith("Greater") else (1, 0)
            number = self.folder.scalar(reads[small]) if self.folder.is_static(reads[small]) else None
            strict = node.op in ("Greater", "Less")
            if number is not None and (facts[big].low > number or (facts[big].low == number and not strict)):
                return _Fact(Growth.UNIFORM)
        if (node.op == "Or" and worst <= Growth.STABLE) or node.op == "And":
            return _Fact(worst)
        return _Fact(worst, low)

    def _only_units(self, source: gs.Tensor, out: gs.Tensor) -> bool:
        """True when a Reshape does no more than add or drop axes of size 1, at all sizes looked at."""
        for folder in self.family.folders():
            a, b = folder.shape(source), folder.shape(out)
            if a is None or b is None or [d for d in a if d != 1] != [d for d in b if d != 1]:
                return False
        return True

    def _selects(self, node: gs.Node, out: gs.Tensor, reads: list[gs.Tensor], facts: list[_Fact]) -> _Fact | None:
        op, data = node.op, facts[0]
        if op == "Concat":
            axis = int(node.attrs["axis"])
            worst = max(f.growth for f in facts)
            ok = worst <= Growth.STABLE and all(self._fixed(t, axis) for t in reads[:-1])
            return _Fact(Growth.STABLE, min(f.low for f in facts)) if ok else None
        if data.growth > Growth.STABLE:
            return None
        if data.growth is Growth.UNIFORM and op in ("Slice", "Split", "Gather", "GatherND"):
            return data
        if op == "Slice":
            starts = self.folder.value(reads[1])
            steady = facts[1].growth <= Growth.STABLE and all(f.growth <= Growth.STABLE for f in facts[3:])
            forward = starts is not None and bool((starts >= 0).all())
            steps = self.folder.value(reads[4]) if len(reads) > 4 else np.ones(1)
            if steady and forward and steps is not None and bool((steps > 0).all()):
                return data
            return None
        if op in ("Gather", "GatherND"):
            if facts[1].growth > Growth.STABLE:
                return None
            indices = self.folder.value(reads[1])
            if indices is not None and indices.size and int(indices.min()) >= 0:
                return _Fact(max(data.growth, facts[1].growth), data.low)
            return None
        if op == "Split":
            axis = int(node.attrs.get("axis", 0))
            before = node.outputs[: next(i for i, t in enumerate(node.outputs) if t is out)]
            return data if all(self._fixed(t, axis) for t in before) else None
        if op == "EyeLike":
            return _Fact(Growth.STABLE)
        if op == "CumSum":
            return _Fact(Growth.STABLE) if not node.attrs.get("reverse", 0) else None
        if op == "Trilu":
            return _Fact(Growth.STABLE) if len(facts) < 2 or facts[1].growth <= Growth.STABLE else None
        return None


def _constant(value: np.ndarray | None) -> _Fact:
    if value is None or value.size == 0:
        return _Fact(Growth.STABLE)
    low = float(value.min()) if value.dtype.kind in "iuf" else -np.inf
    one = bool((value == value.reshape(-1)[0]).all())
    return _Fact(Growth.UNIFORM if one else Growth.STABLE, low)
