"""Plays the terms between Q @ K^T and the softmax on every score at once.

Contract: a score x becomes `kept ? factor * x + added : added`, with `added` computed step by step in the dtypes of the
graph (so overflow to -inf and lost digits happen where they happen in the original). Rows are done in bands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from stof_onnx.attention.masked_row import mask_threshold
from stof_onnx.attention.types import ScoreSite, ScoreTerm

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs
    from stof_onnx.graph.fold import Folder

_BAND_ELEMENTS = 1 << 23


class TermError(Exception):
    """A term that can not be expressed; the text is the refusal's sentence."""

    def __init__(self, reason: str, node: gs.Node | None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


@dataclass(frozen=True)
class TermValue:
    """A term with its arrays, each of rank 4 and broadcastable to [B, H, Sq, Skv]."""

    term: ScoreTerm
    value: np.ndarray | None
    fill: np.ndarray | None


@dataclass(frozen=True)
class Played:
    """What the terms do to rows q0..q1: arrays of rank 4, axes of size 1 where nothing varies."""

    q0: int
    q1: int
    kept: np.ndarray  # bool
    added: np.ndarray  # dtype of the softmax input
    masked: np.ndarray  # bool: `added` is a mask constant, up to a bias beside it
    factor: float


def term_values(
    terms: tuple[ScoreTerm, ...],
    site: ScoreSite,
    folder: Folder,
    feeds: tuple[tuple[gs.Tensor, np.ndarray], ...] = (),
) -> list[TermValue]:
    """Evaluates every term, with `feeds` in place of run-time tensors.

    Raises:
        TermError: a term has no value under these feeds, or does not broadcast to the scores.
        FoldError: a subgraph can not be evaluated.
    """
    done = []
    for term in terms:
        value = fill = None
        if term.build is not None:
            value = as_rank4(term.build(site.batch, site.heads, site.seq_q, site.seq_kv))
        elif term.tensor is not None:
            value = canonical(_value(term.tensor, folder, feeds), term, site, folder)
        if term.fill_tensor is not None:
            fill = canonical(_value(term.fill_tensor, folder, feeds), term, site, folder)
        done.append(TermValue(term, value, fill))
    return done


def _value(tensor: gs.Tensor, folder: Folder, feeds: tuple[tuple[gs.Tensor, np.ndarray], ...]) -> np.ndarray:
    if folder.is_static(tensor):
        value = folder.value(tensor)
        if value is not None:
            return value
    return folder.evaluate([tensor], feeds)[0]


def as_rank4(array: np.ndarray) -> np.ndarray:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def canonical(array: np.ndarray, term: ScoreTerm, site: ScoreSite, folder: Folder) -> np.ndarray:
    """`array` with the axes of [B, H, Sq, Skv], of size 1 where it does not vary."""
    scores = (site.batch, site.heads, site.seq_q, site.seq_kv)
    if term.axes is not None:
        shape = [1, 1, 1, 1]
        for axis, extent in zip(term.axes, array.shape, strict=True):
            shape[axis] = extent
        result = array.reshape(shape)
    elif term.view is None:
        if array.ndim > 4:
            raise TermError("a term has more axes than the scores", term.node)
        result = as_rank4(array)
    else:
        view = folder.shape(term.view)
        if view is None or array.ndim > len(view):
            raise TermError("the sizes of a term are not known", term.node)
        result = regroup(array, view, scores)
    if len(result.shape) != 4 or not all(result.shape[i] in (1, scores[i]) for i in range(4)):
        raise TermError(f"a term of shape {list(array.shape)} does not broadcast to the scores", term.node)
    return _collapsed(result)


def regroup(array: np.ndarray, view: tuple[int, ...], scores: tuple[int, ...]) -> np.ndarray:
    """An array that broadcasts to `view`, a reshape of the scores that keeps the last two axes, as rank 4."""
    array = array.reshape((1,) * (len(view) - array.ndim) + array.shape)
    lead, tail = array.shape[:-2], array.shape[-2:]
    batch, heads = scores[:2]
    if prod(lead) == 1:
        return array.reshape(1, 1, *tail)
    for cut in range(len(lead) + 1):
        if prod(view[:cut]) == batch and prod(view[cut:-2]) == heads:
            first = batch if prod(lead[:cut]) != 1 else 1
            second = heads if prod(lead[cut:]) != 1 else 1
            wide = (view[:cut] if first > 1 else (1,) * cut) + (
                view[cut:-2] if second > 1 else (1,) * (len(lead) - cut)
            )
            return np.broadcast_to(array, (*wide, *tail)).reshape(first, second, *tail)
    return np.broadcast_to(array, (*view[:-2], *tail)).reshape(batch, heads, *tail)


def _collapsed(array: np.ndarray) -> np.ndarray:
    """Batch and head axes along which nothing varies become 1."""
    for axis in (0, 1):
        if array.shape[axis] > 1:
            first = array[(slice(None),) * axis + (slice(0, 1),)]
            rest = (array[(slice(None),) * axis + (slice(i, i + 1),)] for i in range(1, array.shape[axis]))
            if all(np.array_equal(first, other) for other in rest):
                array = first
    return array


def play(values: list[TermValue], site: ScoreSite) -> Iterator[Played]:
    """Runs the chain band by band.

    Raises:
        TermError: a factor that is neither 0/1 nor one number, or NaN.
    """
    wide = np.broadcast_shapes((1, 1, 1, 1), *[a.shape for v in values for a in (v.value, v.fill) if a is not None])
    height = max(1, _BAND_ELEMENTS // max(1, wide[0] * wide[1] * site.seq_kv))
    if wide[2] == 1:
        height = site.seq_q
    for q0 in range(0, site.seq_q, height):
        q1 = min(q0 + height, site.seq_q)
        with np.errstate(all="ignore"):
            yield _band(values, site, q0, q1)


def _rows(array: np.ndarray, q0: int, q1: int) -> np.ndarray:
    return array if array.shape[2] == 1 else array[:, :, q0:q1]


def _band(values: list[TermValue], site: ScoreSite, q0: int, q1: int) -> Played:
    kept = np.ones((1, 1, 1, 1), bool)
    added = np.zeros((1, 1, 1, 1), site.dtype)
    struck = np.zeros((1, 1, 1, 1), bool)
    threshold = mask_threshold(site.softmax_dtype)
    factor = 1.0
    for item in values:
        term = item.term
        value = _rows(item.value, q0, q1) if item.value is not None else None
        if term.kind == "cast":
            added = added.astype(term.dtype)
        elif term.kind == "add":
            assert value is not None
            signed = -value if term.negate else value
            struck = struck | (signed <= threshold)
            added = (added + signed).astype(term.dtype)
        elif term.kind == "where":
            assert value is not None
            fill = _rows(item.fill, q0, q1) if item.fill is not None else np.asarray(term.fill, term.dtype)
            keep = value.astype(bool) == term.keep
            kept = kept & keep
            added = np.where(keep, added, fill).astype(term.dtype)
        elif value is None:
            assert term.fill is not None
            factor *= term.fill
            added = (added * np.asarray(term.fill, term.dtype)).astype(term.dtype)
        else:
            flags = value != 0
            if not np.array_equal(flags.astype(value.dtype), value):
                raise TermError("the scores are multiplied by values other than 0 and 1", term.node)
            kept = kept & flags
            added = np.where(flags, added, np.zeros((), added.dtype)).astype(term.dtype)
    if np.isnan(added).any():
        raise TermError("the mask terms give NaN", values[-1].term.node if values else None)
    masked = (added <= threshold) | (struck & (added <= threshold / 2))
    return Played(q0, q1, kept, added, masked, factor)
