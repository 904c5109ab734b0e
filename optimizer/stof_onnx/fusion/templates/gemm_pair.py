"""`gemm_pair`: outer(inner(x w1 + b1) w2 + b2) + residual, where few columns lie between the two products.

Adapters, bottlenecks, low-rank layers. Both weights are constant, all sizes are multiples of 8, and the hidden columns
fit on the chip (kernels/gemm_pair).
"""

from __future__ import annotations

from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates.algebra import Algebra
from stof_onnx.fusion.templates.gemm import MULTIPLE, Attributes, rows_of, with_activation
from stof_onnx.fusion.templates.types import Instance, NoMatch
from stof_onnx.kernels.gemm_pair import MOST_HIDDEN


def gemm_pair(segment: Segment, a: Algebra) -> Instance | NoMatch:
    """Two GEMMs in a row, each part but the products optional."""
    output = segment.outputs[0]
    second = with_activation(a, a.of(output))
    if isinstance(second, NoMatch):
        return second
    outer, last = second
    first = with_activation(a, last.x)
    if isinstance(first, NoMatch):
        return first
    inner, start = first
    x = a.form(start.x)
    if x[0] != "input" or start.residual:
        return NoMatch("something is computed ahead of the first GEMM, or added between the two")
    name = str(x[1])
    depth, hidden, width = (a.shapes[e].width for e in (start.x, last.x, a.of(output)))
    if hidden > MOST_HIDDEN:
        return NoMatch(f"{hidden} columns between its GEMMs, at most {MOST_HIDDEN} stay on the chip")
    if any(n % MULTIPLE for n in (depth, hidden, width)):
        return NoMatch(f"weights of {depth} x {hidden} x {width}: all must be multiples of {MULTIPLE}")
    if a.leading(name) != a.leading(output):
        return NoMatch("its output has other leading axes than its input")
    inputs = filter(None, (name, start.weight, last.weight, start.bias, last.bias, last.residual))
    attributes: Attributes = {
        "hidden": hidden,
        "inner": inner,
        "outer": outer,
        "inner_bias": int(bool(start.bias)),
        "outer_bias": int(bool(last.bias)),
        "has_residual": int(bool(last.residual)),
    }
    return Instance(
        "gemm_pair",
        tuple(inputs),
        (output,),
        attributes,
        a.dtype,
        rows_of(segment.block.tensors.opt(name)),
        width,
        depth,
        1 + len(a.leading(output)),
        transposed=(start.transposed, last.transposed),
        vectors=tuple(filter(None, (start.bias, last.bias))),
    )
