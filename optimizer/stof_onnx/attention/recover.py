"""Mask recovery: the terms between Q @ K^T and the softmax become a static mask, run-time padding, bias, masked_row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stof_onnx.attention.types import Recovered, Refusal, ScoreSite, ScoreTerm

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder


def recover(terms: tuple[ScoreTerm, ...], site: ScoreSite, folder: Folder) -> Recovered | Refusal:
    """Sorts `terms` (graph order) into mask, bias, run-time padding and the meaning of rows that see no key."""
    raise NotImplementedError
