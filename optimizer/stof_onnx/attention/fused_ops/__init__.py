"""Operators that are an attention by themselves: ONNX `Attention`, and those of com.microsoft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_graphsurgeon as gs
from stof_onnx.attention.fused_ops.group_query import match_group_query_attention
from stof_onnx.attention.fused_ops.multi_head import match_microsoft_attention, match_multi_head_attention
from stof_onnx.attention.fused_ops.onnx_attention import match_onnx_attention
from stof_onnx.attention.fused_ops.site import FusedSite, Refused
from stof_onnx.attention.types import AttentionMatch, Refusal

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder
    from stof_onnx.graph.model import LoadedModel

Matcher = Callable[[FusedSite], AttentionMatch | Refusal]
_MATCHERS: dict[tuple[str, str], Matcher] = {
    ("", "Attention"): match_onnx_attention,
    ("com.microsoft", "Attention"): match_microsoft_attention,
    ("com.microsoft", "MultiHeadAttention"): match_multi_head_attention,
    ("com.microsoft", "GroupQueryAttention"): match_group_query_attention,
}
FUSED_OPS = frozenset(_MATCHERS)


def is_fused(node: gs.Node) -> bool:
    """Whether `node` is an operator that `match_fused` reads."""
    return (_domain(node), node.op) in FUSED_OPS


def match_fused(
    model: LoadedModel,
    graph: gs.Graph,
    node: gs.Node,
    folder: Folder,
    others: Sequence[Folder] = (),
    assume_no_empty_rows: bool = False,
) -> AttentionMatch | Refusal:
    """Reads one fused attention operator of `graph`.

    Args:
        folder: values and shapes at the largest sizes.
        others: its probes: an axis whose size differs there is dynamic.
        assume_no_empty_rows: run-time padding never hides all keys of a row.
    """
    site = FusedSite(model, graph, node, folder, tuple(others), assume_no_empty_rows)
    try:
        return _MATCHERS[(_domain(node), node.op)](site)
    except Refused as reason:
        return site.refusal(str(reason))


def _domain(node: gs.Node) -> str:
    return "" if node.domain in (None, "ai.onnx") else str(node.domain)
