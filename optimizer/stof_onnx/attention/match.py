"""Finds every attention of a model that is provably one StofAttention node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stof_onnx.attention.types import AttentionMatch, Refusal

if TYPE_CHECKING:
    from stof_onnx.graph.model import LoadedModel
    from stof_onnx.options import OptimizeOptions


def find_attention(model: LoadedModel, options: OptimizeOptions) -> tuple[list[AttentionMatch], list[Refusal]]:
    """Matches and refusals in graph order; edits nothing."""
    return [], []
