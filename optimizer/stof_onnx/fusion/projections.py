"""The GEMMs that make Q, K and V of one attention from one input, which lowering packs into one."""

from __future__ import annotations

from dataclasses import dataclass

from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import Operator, is_attention

_RANK = 3


@dataclass(frozen=True)
class Projections:
    """x w + b for Q, K and V in this order; `biases` is empty where there are none.

    Attributes:
        operators: all of them, GEMMs and bias additions.
        outputs: Q, K, V: [batch, sequence, width].
        depth: last axis of x; `widths`: of the outputs.
    """

    operators: tuple[Operator, ...]
    x: str
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    outputs: tuple[str, ...]
    depth: int
    widths: tuple[int, ...]


def projections_of(segment: Segment) -> Projections | None:
    """The projections among the operators of a segment, where all of an attention's are there and can be packed."""
    tensors = segment.block.tensors
    attention = next((n for n in tensors.nodes if is_attention(n) and set(n.input[:3]) <= set(segment.outputs)), None)
    if attention is None:
        return None
    outputs = tuple(attention.input[:3])
    parts = [_linear(segment, name) for name in outputs]
    found = [part for part in parts if part is not None]
    if len(set(outputs)) < 3 or len(found) < 3 or len({gemm.node.input[0] for gemm, _, _ in found}) > 1:
        return None
    biases = tuple(bias for _, _, bias in found if bias)
    shapes = [tensors.shape(name) for name in outputs]
    weights = [tensors.shape(gemm.node.input[1]) for gemm, _, _ in found]
    if len(biases) not in (0, 3) or any(s is None or len(s) != _RANK for s in shapes):
        return None
    widths = tuple(int(w[1]) for w in weights if w is not None and isinstance(w[1], int))
    depth = weights[0][0] if weights[0] is not None else None
    if len(widths) < 3 or not isinstance(depth, int):
        return None
    operators = sorted({o.index: o for gemm, add, _ in found for o in (gemm, add)}.items())
    names = tuple(gemm.node.input[1] for gemm, _, _ in found)
    return Projections(tuple(o for _, o in operators), found[0][0].node.input[0], names, biases, outputs, depth, widths)


def _linear(segment: Segment, name: str) -> tuple[Operator, Operator, str] | None:
    """MatMul, or MatMul + Add of a constant vector, that nothing else reads: the GEMM, the last operator, the bias."""
    block, tensors = segment.block, segment.block.tensors

    def maker(tensor: str) -> Operator | None:
        position = block.producer.get(tensor, -1)
        return block.operators[position] if segment.start <= position < segment.stop else None

    last = maker(name)
    if last is None or len(tensors.readers[name]) != 1 or name in tensors.graph_outputs:
        return None
    gemm, bias = last, ""
    if last.op == "Add":
        constants = [n for n in last.node.input if tensors.is_constant(n)]
        products = [n for n in last.node.input if n not in constants]
        if len(constants) != 1 or len(products) != 1 or len(tensors.shape(constants[0]) or ()) != 1:
            return None
        bias, product = constants[0], maker(products[0])
        if product is None or len(tensors.readers[products[0]]) != 1:
            return None
        gemm = product
    return (gemm, last, bias) if gemm.op == "MatMul" and gemm.gemm else None
