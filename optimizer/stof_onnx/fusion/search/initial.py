"""The initial scheme: the subgraphs that transformers repeat, longest first from left to right.

A GEMM takes the bias, activation and residual behind it; a gated MLP both its GEMMs; a norm the sum ahead of it
where no GEMM has taken that already. GEMMs take neither norms nor each other: that gains at few sizes
(cuda/NOTES_fused.md), and is the search's to find.
"""

from __future__ import annotations

from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.timer import Region

_FOUND_LATER = ("gemm_norm", "gemm_pair")


def initial_choice(space: BlockSpace) -> dict[Span, Region]:
    """Regions that do not overlap, as above."""
    chosen: dict[Span, Region] = {}
    at = 0
    while at < len(space.block):
        usual = (s for s, region in space.regions.items() if region.instance.template not in _FOUND_LATER)
        stops = [stop for start, stop in usual if start == at]
        if stops:
            span = (at, max(stops))
            chosen[span] = space.regions[span]
            at = span[1]
        else:
            at += 1
    return chosen
