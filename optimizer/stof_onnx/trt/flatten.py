"""Tensors [B, S, C] between packed attentions become [B*S, C], so that TensorRT puts no reshape beside a plugin.

What makes it safe: an operator is converted only when it treats every row of the last axis alike (the table below), and
when all its run-time operands provably have the same B and S. That is proven by equal inferred sizes or by following
such operators: a row-wise operator's output has the B and S of its operands, and where it has only one run-time operand
also the other way round. Everything else keeps its rank behind a Reshape.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from stof_onnx.graph.proto_graph import ProtoGraph, attributes_of, read_names
from stof_onnx.graph.proto_shapes import SymbolicShapes
from stof_onnx.trt.pack_qkv import carrier, to_rank_3
from stof_onnx.trt.plugin_nodes import is_plugin
from stof_onnx.trt.region_nodes import is_region_plugin, set_rank

# fmt: off
_UNARY = frozenset({
    "Abs", "Cast", "Ceil", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Cos",
    "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu",
})
# fmt: on
_BINARY = frozenset(["Add", "Sub", "Mul", "Div", "Pow", "Min", "Max"])
_REDUCTIONS = frozenset(["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"])
_LAST_AXIS = frozenset({"Softmax", "LogSoftmax", "LayerNormalization"})


@dataclass(frozen=True)
class _RowWise:
    """A node that can be converted: its run-time operands, and whether it is a mere Reshape between the two ranks."""

    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    reshape: bool = False


def flatten(model: onnx.ModelProto, shapes: SymbolicShapes) -> int:
    """Converts what is connected to packed attentions in the main graph; returns the number of converted operators.

    Where nothing is packed the ranks stay: the gain was measured for packed plugins alone.
    """
    if not any(is_plugin(n) and attributes_of(n)["layout"] == "packed" for n in model.graph.node):
        return 0
    return _Flattener(ProtoGraph(model.graph), shapes).run()


class _SizesUnknown(Exception):
    """B and S of a tensor that has to leave are known at run time only, and no 3-D tensor tells them."""


class _Flattener:
    def __init__(self, graph: ProtoGraph, shapes: SymbolicShapes) -> None:
        self.graph, self.shapes = graph, shapes
        self.nodes = list(graph.graph.node)
        self._parent: dict[object, object] = {}
        self.key: dict[str, object] = {}  # of 3-D and 2-D row tensors: who has the same B and S
        for name in [*shapes.dims, *shapes.rows_of]:
            self._first_key(name)
        self.candidates = {i: c for i, n in enumerate(self.nodes) if (c := self._candidate(n)) is not None}

    def run(self) -> int:
        self._spread()
        chosen = self._connected({i for i, c in self.candidates.items() if self._agrees(i, c)})
        try:
            self.graph.replace_nodes(_Writer(self, chosen).write())
        except _SizesUnknown:
            return 0
        return sum(1 for i in chosen if not is_plugin(self.nodes[i]))

    def width(self, name: str) -> int | None:
        last = self.shapes.dim(name, -1)
        return last if isinstance(last, int) else None

    def is_flat(self, name: str) -> bool:
        return self.shapes.rank(name) == 2

    # -- who has the same B and S

    def find(self, key: object) -> object:
        while (up := self._parent.get(key, key)) != key:
            key = up
        return key

    def _first_key(self, name: str) -> None:
        if self.graph.constant(name) is not None and name in self.graph.initializers:
            return
        if name in self.shapes.rows_of:
            self._join(name, ("rows", self.shapes.rows_of[name]))
            self._join(self.shapes.rows_of[name], ("rows", self.shapes.rows_of[name]))
        if self.shapes.rank(name) == 3 and None not in self.shapes.leading(name):
            self._join(name, ("sizes", *self.shapes.leading(name)))

    def _join(self, name: str, key: object) -> bool:
        """Notes that `name` has the B and S of `key`; False when that was known."""
        if name not in self.key:
            self.key[name] = key
            return True
        a, b = self.find(self.key[name]), self.find(key)
        if a != b:
            self._parent[a] = b
        return a != b

    def _spread(self) -> None:
        changed = True
        while changed:
            changed = False
            for row_wise in self.candidates.values():
                if row_wise.reshape:  # what it makes of B and S is for the inferred sizes to say
                    continue
                output = row_wise.outputs[0]
                known = [self.key[o] for o in row_wise.operands if o in self.key]
                if len(known) == len(row_wise.operands) and len({self.find(k) for k in known}) == 1:
                    for name in row_wise.outputs:
                        changed |= self._join(name, known[0])
                elif len(row_wise.operands) == 1 and not known and output in self.key:
                    changed |= self._join(row_wise.operands[0], self.key[output])

    def _agrees(self, number: int, row_wise: _RowWise) -> bool:
        names = [*row_wise.operands, *row_wise.outputs]
        return all(n in self.key for n in names) and len({self.find(self.key[n]) for n in names}) == 1

    def _connected(self, usable: set[int]) -> set[int]:
        """The usable nodes that a chain of row tensors joins with a packed attention."""
        touching: dict[str, list[int]] = defaultdict(list)
        for i in usable:
            for name in (*self.candidates[i].operands, *self.candidates[i].outputs):
                touching[name].append(i)
        reached = {i for i in usable if is_plugin(self.nodes[i])}
        pending = list(reached)
        while pending:
            i = pending.pop()
            for name in (*self.candidates[i].operands, *self.candidates[i].outputs):
                fresh = [j for j in touching[name] if j not in reached]
                reached.update(fresh)
                pending += fresh
        return reached

    # -- which operators are row-wise

    def _candidate(self, node: onnx.NodeProto) -> _RowWise | None:
        outputs = tuple(node.output)
        if is_plugin(node):
            return _RowWise((node.input[0],), outputs) if attributes_of(node)["layout"] == "packed" else None
        if is_region_plugin(node):
            operands = tuple(name for name in node.input if self.graph.constant(name) is None)
            alike = len({self.shapes.rank(name) for name in (*operands, *outputs)}) == 1
            return _RowWise(operands, outputs) if alike and self.width(outputs[0]) is not None else None
        if node.domain not in ("", "ai.onnx") or sum(1 for o in node.output if o) != 1 or not node.input:
            return None
        tensors = node.input[:1] if node.op_type == "Reshape" else node.input
        operands = tuple(name for name in tensors if name and self.graph.constant(name) is None)
        constants = [c for name in node.input if name and (c := self.graph.constant(name)) is not None]
        ranks = {self.shapes.rank(name) for name in (*operands, node.output[0])}
        if not operands or not ranks <= {2, 3}:
            return None
        if node.op_type == "Reshape":
            return self._reshape(node, operands, ranks)
        if len(ranks) > 1 or any(self.width(name) is None for name in (*operands, node.output[0])):
            return None
        return _RowWise(operands, outputs) if self._row_wise(node, operands, constants, ranks.pop() or 0) else None

    def _reshape(self, node: onnx.NodeProto, operands: tuple[str, ...], ranks: set[int | None]) -> _RowWise | None:
        """Rows to [B, S, C] or back, with the last axis untouched. Whether B and S fit, their keys tell."""
        source, output = node.input[0], node.output[0]
        width = self.width(source)
        if ranks != {2, 3} or width is None or self.width(output) != width:
            return None
        if self.is_flat(output):  # every row of the source, whatever B and S are
            self._join(output, ("rows", source))
            self._join(source, ("rows", source))
        return _RowWise((source,), (output,), reshape=True)

    def _row_wise(
        self, node: onnx.NodeProto, operands: tuple[str, ...], constants: list[np.ndarray], rank: int
    ) -> bool:
        op, attributes = node.op_type, attributes_of(node)
        if op == "MatMul":
            return operands == (node.input[0],) and constants[0].ndim == 2
        if op == "Gemm":
            return operands == (node.input[0],) and not attributes.get("transA", 0) and constants[0].ndim == 2
        if op in _UNARY:
            return operands == (node.input[0],) and all(c.ndim == 0 for c in constants)
        if op in _BINARY:
            return all(c.size == c.shape[-1] if c.ndim else True for c in constants)
        if op in _LAST_AXIS:
            first = operands == (node.input[0],) and all(c.ndim <= 1 for c in constants)
            return first and attributes.get("axis", -1) in (-1, rank - 1)
        if op in _REDUCTIONS:
            axes = constants[0].tolist() if constants else attributes.get("axes")
            return operands == (node.input[0],) and attributes.get("keepdims", 1) == 1 and axes in ([-1], [rank - 1])
        return False


class _Writer:
    """Writes the nodes anew: chosen ones on 2-D tensors, with a Reshape where a tensor enters or leaves."""

    def __init__(self, flattener: _Flattener, chosen: set[int]) -> None:
        self.f, self.chosen, self.graph = flattener, chosen, flattener.graph
        self.flat: dict[str, str] = {}
        self.anchor: dict[object, str] = {}  # a 3-D tensor of each kind of rows, made ahead of its users
        self.out: list[onnx.NodeProto] = []
        self.outside: dict[str, int] = defaultdict(int)
        for i, node in enumerate(flattener.nodes):
            if i not in chosen:
                for name in read_names(node):
                    self.outside[name] += 1
        for value in self.graph.graph.output:
            self.outside[value.name] += 1

    def write(self) -> list[onnx.NodeProto]:
        for i, node in enumerate(self.f.nodes):
            if i not in self.chosen:
                self.out.append(node)
            elif self.f.candidates[i].reshape:
                self._alias(node)
            else:
                self._convert(node, self.f.candidates[i])
        return self.out

    def _key(self, name: str) -> object:
        return self.f.find(self.f.key[name])

    def _rows(self, name: str) -> str:
        """The 2-D tensor with the rows of `name`."""
        if name not in self.flat:
            if self.f.is_flat(name):
                self.flat[name] = name
            else:
                width = self.f.width(name)
                target = self.graph.add_constant("stof/flat", np.array([-1, width], np.int64))
                self.flat[name] = self.graph.fresh(f"{name}_2d")
                self.out.append(helper.make_node("Reshape", [name, target], [self.flat[name]], name=self.flat[name]))
                self.anchor.setdefault(self._key(name), name)
        return self.flat[name]

    def _alias(self, node: onnx.NodeProto) -> None:
        source, output = node.input[0], node.output[0]
        self.flat[output] = self._rows(source)
        if self.outside[output]:
            if self.f.is_flat(output):
                self.out.append(helper.make_node("Identity", [self.flat[output]], [output], name=f"{output}_kept"))
            else:
                self._leave(output)

    def _convert(self, node: onnx.NodeProto, row_wise: _RowWise) -> None:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        for place, name in enumerate(node.input):
            if name in row_wise.operands:
                new.input[place] = self._rows(name)
            elif name and not is_plugin(node):
                self._narrow(new, place, name)
        if node.op_type in _LAST_AXIS or node.op_type in _REDUCTIONS:
            self._last_axis(new)
        if is_plugin(node):
            self._carry(new, node.output[0])
        if is_region_plugin(node):
            set_rank(new, 2)
        threed = [name for name in row_wise.outputs if not self.f.is_flat(name)]
        for place, name in enumerate(row_wise.outputs):
            self.flat[name] = self.graph.fresh(f"{name}_2d") if name in threed else name
            new.output[place] = self.flat[name]
        self.out.append(new)
        for name in threed:
            if self.outside[name]:
                self._leave(name)

    def _narrow(self, new: onnx.NodeProto, place: int, name: str) -> None:
        """Constants [1, 1, C] of elementwise operators lose their leading axes."""
        value = self.graph.constant(name)
        if value is not None and value.ndim > 2 and new.op_type in _BINARY:
            new.input[place] = self.graph.add_constant(f"{name}_row", value.reshape(-1))

    def _last_axis(self, new: onnx.NodeProto) -> None:
        if new.op_type in _REDUCTIONS and len(new.input) > 1:
            new.input[1] = self.graph.add_constant("stof/last_axis", np.array([-1], np.int64))
            return
        name, value = ("axes", [-1]) if new.op_type in _REDUCTIONS else ("axis", -1)
        kept = [a for a in new.attribute if a.name != name]
        del new.attribute[:]
        new.attribute.extend([*kept, helper.make_attribute(name, value)])

    def _carry(self, new: onnx.NodeProto, output: str) -> None:
        """A plugin that learns S at run time reads it from a tensor that keeps its rank."""
        if "seq" not in attributes_of(new) and self._key(output) in self.anchor:
            new.input[len(new.input) - 1] = carrier(self.graph, self.anchor[self._key(output)], self.out)

    def _leave(self, output: str) -> None:
        width = self.f.width(output)
        assert width is not None
        rows_of = self.anchor.get(self._key(output), "")
        leading = self.f.shapes.leading(output)
        if not rows_of and not any(isinstance(size, int) for size in leading):
            raise _SizesUnknown
        self.out += to_rank_3(self.graph, self.flat[output], output, width, leading, rows_of)
