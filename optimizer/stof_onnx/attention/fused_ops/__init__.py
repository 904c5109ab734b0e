"""Operators that are an attention by themselves: ONNX `Attention`, and those of com.microsoft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_graphsurgeon as gs
from stof_onnx.attention.fused_ops.onnx_attention import match_onnx_attention
from stof_onnx.attention.fused_ops.site import FusedSite
from stof_onnx.attention.types import AttentionMatch, Refusal

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder
    from stof_onnx.graph.model import LoadedModel

Matcher = Callable[[FusedSite], AttentionMatch | Refusal]
_MATCHERS: dict[tuple[str, str], Matcher] = {("", "Attention"): match_onnx_attention}
FUSED_OPS = frozenset(_MATCHERS)


def is_fused(node: gs.Node) -> bool:
    """Whether `node` is an operator that `match_fused` reads."""
    return (_domain(node), node.op) in FUSED_OPS


def match_fused(
    model: LoadedModel, graph: gs.Graph, node: gs.Node, folder: Folder, others: Sequence[Folder] = ()
) -> AttentionMatch | Refusal:
    """Reads one fused attention operator of `graph`.

    Args:
        folder: values and shapes at the largest sizes.
        others: the same at other sizes that the inputs may have; an axis whose size differs there is dynamic.
    """
    return _MATCHERS[(_domain(node), node.op)](FusedSite(model, graph, node, folder, tuple(others)))


def _domain(node: gs.Node) -> str:
    return "" if node.domain in (None, "ai.onnx") else str(node.domain)
