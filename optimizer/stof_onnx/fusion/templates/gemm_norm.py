"""`gemm_norm`: LayerNorm or RMSNorm of x w + bias + residual, the sum as second output where something else reads it.

The weight is constant, its sizes are multiples of 8, and the kernels take rows up to a longest one (kernels/gemm.py).
"""

from __future__ import annotations

from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates.algebra import Algebra
from stof_onnx.fusion.templates.gemm import MULTIPLE, Attributes, linear, rows_of
from stof_onnx.fusion.templates.norm import norm_of
from stof_onnx.fusion.templates.types import Instance, NoMatch


def gemm_norm(segment: Segment, a: Algebra) -> Instance | NoMatch:
    """The norm of a GEMM with bias and residual."""
    expressions = {name: a.of(name) for name in segment.outputs}
    output, norm = next(((name, found) for name, e in expressions.items() if (found := norm_of(a, e))), ("", None))
    if norm is None:
        return NoMatch("no norm follows its GEMM")
    others = [name for name in segment.outputs if name != output]
    if len(others) > 1 or any(expressions[name] != norm.source for name in others):
        return NoMatch("something else than the normalised tensor and the sum is read outside")
    sum_ = linear(a, norm.source)
    if isinstance(sum_, NoMatch):
        return sum_
    if len({a.leading(name) for name in (sum_.x, output, *others)}) > 1:
        return NoMatch("its outputs have other leading axes than its input")
    width, depth = a.shapes[norm.source].width, a.shapes[a.of(sum_.x)].width
    if width % MULTIPLE or depth % MULTIPLE:
        return NoMatch(f"a weight of {depth} x {width}: both must be multiples of {MULTIPLE}")
    vectors = [sum_.bias, norm.scale, norm.shift]
    inputs = filter(None, (sum_.x, sum_.weight, sum_.bias, sum_.residual, norm.scale, norm.shift))
    attributes: Attributes = {
        "kind": norm.kind,
        "epsilon": norm.epsilon,
        "has_bias": int(bool(sum_.bias)),
        "has_residual": int(bool(sum_.residual)),
        "has_scale": int(bool(norm.scale)),
        "has_shift": int(bool(norm.shift)),
        "keep_sum": len(others),
    }
    return Instance(
        "gemm_norm",
        tuple(inputs),
        (output, *others),
        attributes,
        a.dtype,
        rows_of(segment.block.tensors.opt(sum_.x)),
        width,
        depth,
        1 + len(a.leading(output)),
        transposed=(sum_.transposed,),
        vectors=tuple(filter(None, vectors)),
    )
