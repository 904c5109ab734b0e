"""`chain`: any elementwise operators on rows, with means along rows, that no named template is."""

from __future__ import annotations

from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates.algebra import FULL, VECTOR, Algebra
from stof_onnx.fusion.templates.gemm import rows_of
from stof_onnx.fusion.templates.types import Instance, NoMatch

_FREE = frozenset({"Cast", "Identity", "Reshape"})
_MOST_OUTPUTS, _MULTIPLE = 2, 8


def chain(segment: Segment, a: Algebra) -> Instance | NoMatch:
    """Outputs [rows, width] of inputs [rows, width] and constant vectors [width].

    Raises:
        Unsupported: an operator that has no expression (see algebra.py).
    """
    if sum(1 for operator in segment.operators if operator.op not in _FREE) < 2:
        return NoMatch("a single operator: there is nothing to merge")
    if len(segment.outputs) > _MOST_OUTPUTS:
        return NoMatch(f"{len(segment.outputs)} of its tensors are read outside, at most {_MOST_OUTPUTS} may be")
    shapes = {name: a.shapes[a.of(name)] for name in (*segment.inputs, *segment.outputs)}
    rows = [name for name in segment.inputs if shapes[name].kind == FULL]
    vectors = tuple(name for name in segment.inputs if shapes[name].kind == VECTOR)
    if not rows or any(shapes[name].kind != FULL for name in segment.outputs):
        return NoMatch("an output is one number a row, or nothing known at run time goes in")
    if len({shape.width for shape in shapes.values()}) > 1 or shapes[rows[0]].width % _MULTIPLE:
        return NoMatch(f"its tensors differ in width, or it is no multiple of {_MULTIPLE}")
    if len({a.leading(name) for name in (*rows, *segment.outputs)}) > 1:
        return NoMatch("its outputs have other leading axes than its inputs")
    width, count = shapes[rows[0]].width, rows_of(segment.block.tensors.opt(rows[0]))
    rank = 1 + len(a.leading(rows[0]))
    inputs = (*rows, *vectors)
    return Instance("chain", inputs, segment.outputs, {}, a.dtype, count, width, width, rank, vectors=vectors)
