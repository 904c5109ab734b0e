"""The initial scheme: the subgraphs that transformers repeat, longest first from left to right.

A GEMM takes the bias, activation and residual behind it; a gated MLP both its GEMMs; a norm the sum ahead of it
where no GEMM has taken that already. GEMMs do not take norms: that gains at few sizes (cuda/NOTES_fused.md), and is the
search's to find.
"""

from __future__ import annotations

from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.timer import Region


def initial_choice(space: BlockSpace) -> dict[Span, Region]:
    """Regions that do not overlap, as above."""
    chosen: dict[Span, Region] = {}
    at = 0
    while at < len(space.block):
        stops = [s[1] for s, region in space.regions.items() if s[0] == at and region.instance.template != "gemm_norm"]
        if stops:
            span = (at, max(stops))
            chosen[span] = space.regions[span]
            at = span[1]
        else:
            at += 1
    return chosen
