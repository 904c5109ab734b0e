"""The operators between attentions, as sequences: one block for each stretch of the graph.

Attention nodes part the graph: an operator belongs to block d when d attentions lie on the longest path to it. Within a
block the operators keep the order of the file, which is a topological one. Operators that depend on constants only are
no part of it, since builders fold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import onnx

from stof_onnx.attention.functions import DOMAIN
from stof_onnx.attention.functions.attention import PREFIX
from stof_onnx.fusion.tensors import FLOATS, Tensors
from stof_onnx.graph.proto_graph import read_names, subgraphs

STANDARD = ("", "ai.onnx")
GEMMS = frozenset({"MatMul", "Gemm"})
_TO_ATTENTION = frozenset({"Add", "Reshape", "Split", "Identity"})


@dataclass(frozen=True)
class Operator:
    """One node of the main graph.

    Attributes:
        index: its place there.
        gemm: it multiplies by a constant matrix.
        projection: it is one of several GEMMs that make Q, K or V of an attention, or is behind one. Lowering packs
            these into one GEMM, so only a region of all of them takes them.
    """

    index: int
    node: onnx.NodeProto
    gemm: bool
    projection: bool

    @property
    def op(self) -> str:
        return str(self.node.op_type)

    def __repr__(self) -> str:
        return f"{self.op}#{self.index}"


class Block:
    """The operators between two attentions, in order. Positions in a block count from 0."""

    def __init__(self, tensors: Tensors, operators: tuple[Operator, ...]) -> None:
        self.tensors, self.operators = tensors, operators
        self.position = {operator.index: i for i, operator in enumerate(operators)}

    def __len__(self) -> int:
        return len(self.operators)

    def light(self) -> Block:
        """The same without weights, for other processes."""
        return Block(self.tensors.light(), self.operators)

    @cached_property
    def producer(self) -> dict[str, int]:
        """Position of the operator that makes a tensor, for tensors made in this block."""
        return {name: i for i, o in enumerate(self.operators) for name in o.node.output if name}

    def read_outside(self, name: str, start: int, stop: int) -> bool:
        """Whether a tensor is a graph output, or read by a node that is not among the operators start to stop - 1."""
        if name in self.tensors.graph_outputs:
            return True
        inside = (self.position.get(i, -1) for i in self.tensors.readers[name])
        return any(not start <= position < stop for position in inside)


def find_blocks(tensors: Tensors) -> list[Block]:
    """The blocks of a model's main graph, in order; those without operators are left out."""
    depth: dict[str, int] = {}
    projections = _projections(tensors)
    members: dict[int, list[Operator]] = {}
    for index, node in enumerate(tensors.nodes):
        level = max((depth.get(name, 0) for name in read_names(node)), default=0)
        outputs = [name for name in node.output if name]
        attention = is_attention(node)
        for name in outputs:
            depth[name] = level + attention
        # What makes dense masks is read by the bodies of attentions only: no plugin, and no engine, has it.
        if node.domain != DOMAIN and not all(tensors.is_constant(name) for name in outputs):
            operator = Operator(index, node, _is_gemm(tensors, node), index in projections)
            members.setdefault(level, []).append(operator)
    return [Block(tensors, tuple(members[level])) for level in sorted(members)]


def is_attention(node: onnx.NodeProto) -> bool:
    """Whether `node` calls an attention of the portable file."""
    return node.domain == DOMAIN and str(node.op_type).startswith(PREFIX + "_")


def _projections(tensors: Tensors) -> set[int]:
    """The operators from the last GEMM on that make Q, K and V, where nothing but Add, Reshape and Split is between."""
    found: set[int] = set()
    for node in tensors.nodes:
        if is_attention(node):
            made = _makers(tensors, list(node.input[:3]))
            if sum(_is_gemm(tensors, tensors.nodes[i]) for i in made) > 1:
                found |= made
    return found


def _makers(tensors: Tensors, pending: list[str]) -> set[int]:
    found: set[int] = set()
    while pending:
        number = tensors.producer.get(pending.pop())
        node = None if number is None else tensors.nodes[number]
        if node is None or number is None or number in found or node.domain not in STANDARD:
            continue
        if _is_gemm(tensors, node):
            found.add(number)
        elif node.op_type in _TO_ATTENTION:
            chain = [name for name in node.input if not tensors.is_constant(name)]
            if len(chain) == 1:
                found.add(number)
                pending += chain
    return found


def _is_gemm(tensors: Tensors, node: onnx.NodeProto) -> bool:
    """A product with a constant matrix, in a floating-point type."""
    if node.domain not in STANDARD or node.op_type not in GEMMS or any(True for _ in subgraphs(node)):
        return False
    weight = tensors.shape(node.input[1])
    floating = tensors.types.get(node.input[1]) in FLOATS
    return floating and weight is not None and len(weight) == 2 and tensors.is_constant(node.input[1])
