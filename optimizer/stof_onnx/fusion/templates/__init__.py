"""Which template computes a segment."""

from __future__ import annotations

from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates.algebra import Algebra, Unsupported
from stof_onnx.fusion.templates.chain import chain
from stof_onnx.fusion.templates.gemm import gated_mlp, gemm_epilogue, projections
from stof_onnx.fusion.templates.gemm_norm import gemm_norm
from stof_onnx.fusion.templates.gemm_pair import gemm_pair
from stof_onnx.fusion.templates.norm import norm
from stof_onnx.fusion.templates.types import GEMM_TEMPLATES, Instance, NoMatch, Template

__all__ = ["GEMM_TEMPLATES", "Instance", "NoMatch", "Template", "recognise"]


def recognise(segment: Segment) -> Instance | NoMatch:
    """The instance that computes exactly the segment's outputs from its inputs, or why there is none."""
    if problem := segment.problem():
        return NoMatch(problem)
    found = _recognise(segment)
    if isinstance(found, Instance) and not set(segment.inputs) <= set(found.inputs):
        return NoMatch("it reads a tensor that its outputs do not depend on")
    return found


def _recognise(segment: Segment) -> Instance | NoMatch:
    try:
        algebra = Algebra(segment)
        gemms = sum(1 for operator in segment.operators if operator.gemm)
        if not gemms:
            found = norm(segment, algebra)
            return chain(segment, algebra) if isinstance(found, NoMatch) else found
        if segment.operators[0].projection:
            return projections(segment, algebra)
        if gemms == 1 and isinstance(found := gemm_norm(segment, algebra), Instance):
            return found
        if len(segment.outputs) > 1:
            return NoMatch("more than one of its tensors is read outside")
        if gemms == 1:
            return gemm_epilogue(segment, algebra)
        return gated_mlp(segment, algebra) if segment.gemms == 1 else gemm_pair(segment, algebra)
    except Unsupported as unsupported:
        return NoMatch(str(unsupported))
