"""Mask recovery: the terms between Q @ K^T and the softmax become a static mask, run-time padding, bias, masked_row.

Contract: with x the scores, softmax over the graph's terms equals softmax(factor * x + bias over the keys that mask and
kv_mask allow) for every score up to `score_bound`, rows without keys by `masked_row`. Otherwise a Refusal says why not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat
from math import inf, log
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.bias import bias_term
from stof_onnx.attention.dynamic import check_lengths
from stof_onnx.attention.masked_row import RowClassifier, RowRule, working_dtype
from stof_onnx.attention.movement import sources
from stof_onnx.attention.padding import Padding, paddings, runtime_tensors
from stof_onnx.attention.rounding import NO_EMPTY_ROWS, lossy_constant, lossy_reason, unknown_note
from stof_onnx.attention.terms import Played, TermError, TermValue, play, term_values
from stof_onnx.attention.types import (
    BiasKind,
    BiasTerm,
    KvKind,
    KvMask,
    MaskedRow,
    Recovered,
    Refusal,
    ScoreSite,
    ScoreTerm,
)
from stof_onnx.attention.views import View
from stof_onnx.graph.fold import FoldError
from stof_onnx.graph.model import node_label
from stof_onnx.mask.encode import encode

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder

_LEAST_BOUND = 1000.0  # scores up to this size must leave masks masks
_NOTED = 1e30  # bounds above are not worth a line in the report
Feeds = tuple[tuple[gs.Tensor, np.ndarray], ...]


def recover(terms: tuple[ScoreTerm, ...], site: ScoreSite, folder: Folder) -> Recovered | Refusal:
    """Sorts `terms` (graph order) into mask, bias, run-time padding and the meaning of rows that see no key."""
    try:
        return _recover(terms, site, folder)
    except TermError as error:
        nodes = (node_label(error.node),) if error.node is not None else ()
        return Refusal(error.reason, nodes, site.name)
    except FoldError as error:
        return Refusal(f"a mask can not be evaluated: {error}", _labels(terms), site.name)


def _labels(terms: tuple[ScoreTerm, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node_label(t.node) for t in terms if t.node is not None))


def _recover(terms: tuple[ScoreTerm, ...], site: ScoreSite, folder: Folder) -> Recovered | Refusal:
    runtime = runtime_tensors(terms, folder)
    if not runtime:
        return _finish(_Parts(terms, site, folder), (), None, None)
    padding = _padding(terms, site, folder)
    if padding is not None:
        return _padded(terms, site, folder, *padding, None)
    return _with_run_time_bias(terms, site, folder, runtime)


def _padded(
    terms: tuple[ScoreTerm, ...],
    site: ScoreSite,
    folder: Folder,
    padding: Padding,
    invert: bool,
    bias: _RunTimeBias | None,
) -> Recovered | Refusal:
    parts = _Parts(terms, site, folder)
    shown = padding.filled(0 if invert else 1)
    hidden = padding.filled(1 if invert else 0)
    if not padding.boolean:
        parts.notes.append(f"'{padding.root.name}' is taken to hold nothing but 0 and 1")
    kv = KvMask(KvKind.MASK, padding.root, invert)
    return _finish(parts, shown, hidden, kv, bias)


def _padding(terms: tuple[ScoreTerm, ...], site: ScoreSite, folder: Folder) -> tuple[Padding, bool] | None:
    """The padding of these terms and whether it is inverted: at best one that is 0 or 1 for sure, or a model input."""
    first: tuple[Padding, bool] | None = None
    for padding in paddings(terms, site, folder):
        invert = _hides(terms, site, folder, padding)
        if invert is not None:
            if padding.boolean or not padding.root.inputs:
                return padding, invert
            first = first or (padding, invert)
    return first


def _hides(terms: tuple[ScoreTerm, ...], site: ScoreSite, folder: Folder, padding: Padding) -> bool | None:
    """Which entry of the padding hides a key: False when 0 does, True when 1 does, None when neither hides all."""
    for invert in (False, True):
        values = term_values(terms, site, folder, padding.filled(1 if invert else 0))
        if all(bool(band.masked.all()) for band in play(values, site)):
            other = term_values(terms, site, folder, padding.filled(0 if invert else 1))
            return invert if any(bool((~band.masked).any()) for band in play(other, site)) else None
    return None


@dataclass(frozen=True)
class _RunTimeBias:
    """A dense bias known only at run time; `hides` when its values may be mask constants."""

    term: ScoreTerm
    bias: BiasTerm
    hides: bool
    note: str = ""


@dataclass
class _Parts:
    """What the bands add up to."""

    terms: tuple[ScoreTerm, ...]
    site: ScoreSite
    folder: Folder
    notes: list[str] = field(default_factory=list)
    bound: float = inf  # |score| up to which the finite mask constants are masks
    factor: float = 1.0

    def __post_init__(self) -> None:
        site = self.site
        self.shrinks = any(s[2:] != (site.seq_q, site.seq_kv) for s in site.probe_sizes)
        self.square = site.seq_q == site.seq_kv and all(s[2] == s[3] for s in site.probe_sizes)
        self.rows = RowClassifier(working_dtype(self.terms, self.site), self.site.nan_guard)

    def split(self, values: list[TermValue], hidden: list[TermValue] | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Allowed keys and the bias on them (None when it is 0 everywhere), [B or 1, H or 1, Sq, Skv]."""
        site = self.site
        lead = np.broadcast_shapes((1, 1), *[a.shape[:2] for v in values for a in (v.value, v.fill) if a is not None])
        allowed = np.empty((*lead, site.seq_q, site.seq_kv), bool)
        bias: np.ndarray | None = None
        pairs = zip(play(values, site), play(hidden, site) if hidden is not None else repeat(None), strict=False)
        for band, dark in pairs:
            rows = slice(band.q0, band.q1)
            masked = band.masked
            if (~band.kept & ~masked).any():
                raise TermError("scores are replaced by a value that is no mask constant", self._replacer())
            self.factor = band.factor
            allowed[:, :, rows] = ~masked
            if (~masked & (band.added != 0)).any():
                if bias is None:
                    bias = np.zeros((*lead, site.seq_q, site.seq_kv), band.added.dtype)
                bias[:, :, rows] = np.where(masked, np.zeros((), band.added.dtype), band.added)
            self._bound(band, band, dark is not None or self.shrinks)
            if dark is None:
                self._empty_rows(band, allowed[:, :, rows])
                if self.shrinks:
                    self._cut_rows(band, allowed[:, :, rows])
            else:
                self._bound(band, dark, True)
                self._hidden_rows(band, dark, masked)
        return allowed, bias

    def _replacer(self) -> gs.Node | None:
        return next((t.node for t in reversed(self.terms) if t.kind in ("where", "mul")), None)

    def _bound(self, shown: Played, hidden: Played, any_subset: bool) -> None:
        """|score| up to which exp() of every masked score of `hidden` is below the last bit of a row's sum.

        A masked score competes with the keys that `shown` allows: with the best of them, or, where padding may leave
        any one of them alone, with the worst.
        """
        finite = hidden.masked & np.isfinite(hidden.added)
        if not finite.any():
            return
        slack = 24 * log(2) + log(self.site.seq_kv)
        top: np.ndarray | float = 0.0
        if (~shown.masked & (shown.added != 0)).any():
            worst = np.inf if any_subset else -np.inf
            bias = np.where(shown.masked, worst, shown.added.astype(np.float64))
            top = bias.min(axis=-1, keepdims=True) if any_subset else bias.max(axis=-1, keepdims=True)
            top = np.where(np.isfinite(top), top, np.inf)  # a row without keys is no matter of bounds
        for which, share in ((finite & hidden.kept, 2), (finite & ~hidden.kept, 1)):
            if which.any():
                level = np.where(which, hidden.added.astype(np.float64), -np.inf).max(axis=-1, keepdims=True)
                self.bound = min(self.bound, float(((top - level - slack) / share).min()))

    def _empty_rows(self, band: Played, allowed: np.ndarray) -> None:
        empty = ~allowed.any(axis=-1)
        if empty.any():
            kept = np.broadcast_to(band.kept, allowed.shape)
            added = np.broadcast_to(band.added, allowed.shape)
            self.rows.add_rows(kept[empty], added[empty])

    def _cut_rows(self, band: Played, allowed: np.ndarray) -> None:
        """Rows that lose all their keys when the sequence is shorter: what is left of them is masked."""
        first = allowed.argmax(axis=-1)
        least = np.arange(band.q0, band.q1) if self.square else 0
        cut = allowed.any(axis=-1) & (first > least)
        if cut.any():
            kept = np.broadcast_to(band.kept, allowed.shape)[cut]
            added = np.broadcast_to(band.added, allowed.shape)[cut]
            before = np.arange(allowed.shape[-1]) < first[cut][:, None]
            self.rows.add_rows(np.where(before, kept, kept[:, :1]), np.where(before, added, added[:, :1]))

    def _hidden_rows(self, band: Played, dark: Played, masked: np.ndarray) -> None:
        """Padding can empty every row: each key is then either hidden or, where it was masked anyway, shown."""
        dark_kept, dark_added, shown_kept, shown_added = np.broadcast_arrays(
            dark.kept, dark.added, np.where(masked, band.kept, dark.kept), np.where(masked, band.added, dark.added)
        )
        kept = np.concatenate((dark_kept, shown_kept), axis=-1)
        added = np.concatenate((dark_added, shown_added), axis=-1)
        self.rows.add_rows(kept.reshape(-1, kept.shape[-1]), added.reshape(-1, added.shape[-1]))


def _finish(
    parts: _Parts, shown: Feeds, hidden: Feeds | None, kv: KvMask | None, run_time: _RunTimeBias | None = None
) -> Recovered | Refusal:
    terms, site, folder = parts.terms, parts.site, parts.folder
    dark = term_values(terms, site, folder, hidden) if hidden is not None else None
    allowed, bias = parts.split(term_values(terms, site, folder, shown), dark)
    masked = not allowed.all()
    rule = parts.rows.result()
    if run_time is not None:
        if bias is not None:
            return Refusal("a known bias and one known only at run time", _labels(terms), site.name)
        rule = _run_time_rule(rule, run_time, parts, masked)
        parts.notes += [run_time.note] if run_time.note else []
    if rule.rule is None:
        if (kv is None and run_time is None) or not site.assume_no_empty_rows:
            advice = (
                ""
                if kv is None and run_time is None
                else " (--assume-no-empty-rows where padding never hides every key of a query)"
            )
            return Refusal(rule.reason + advice, _labels(terms), site.name)
        parts.notes.append(NO_EMPTY_ROWS)
    meaning = rule.rule or MaskedRow.ZERO
    problem = check_lengths(terms, site, shown, allowed, bias, folder)
    if problem is not None:
        return problem
    bound = parts.bound
    if bound < _LEAST_BOUND:
        return Refusal(
            "the bias comes so close to the mask constants that these are no masks", _labels(terms), site.name
        )
    if bound < _NOTED:
        parts.notes.append(f"finite mask constants are masks while no |score| exceeds {bound:.4g}")
    if rule.bound < _NOTED and rule.rule is MaskedRow.MEAN:
        parts.notes.append(f"a row without keys is the mean of V while no |score| exceeds {rule.bound:.4g}")
    term = BiasTerm(BiasKind.NONE)
    if run_time is not None:
        term = run_time.bias
    elif bias is not None:
        # A row without keys keeps the bias. That of masked keys is 0, which a vector for all rows can not hold.
        term = BiasTerm(BiasKind.DENSE, bias) if meaning is MaskedRow.SCORES else bias_term(bias, allowed)
    return Recovered(
        mask=encode(allowed) if masked else None,
        bias=term,
        kv_mask=kv or KvMask(KvKind.NONE),
        masked_row=meaning,
        scale_factor=parts.factor,
        notes=tuple(parts.notes),
        score_bound=bound,
    )


def _run_time_rule(rule: RowRule, run_time: _RunTimeBias, parts: _Parts, masked: bool) -> RowRule:
    """Rows can also be emptied by -inf in the bias: then 0/0, unless finite constants stand beside it."""
    empty = MaskedRow.ZERO if parts.site.nan_guard else MaskedRow.NAN
    finite = parts.bound < inf
    if finite and run_time.hides:
        return RowRule(None, reason="a run-time mask beside finite mask constants")
    if not parts.rows.found:
        return RowRule(empty)
    if not finite and rule.rule is not empty:
        return RowRule(None, reason="rows without keys do not all have the same meaning")
    return rule


def _with_run_time_bias(
    terms: tuple[ScoreTerm, ...], site: ScoreSite, folder: Folder, runtime: list[tuple[ScoreTerm, gs.Tensor]]
) -> Recovered | Refusal:
    """One of the run-time terms is a dense bias, the others (if any) are padding."""
    problem: Refusal | None = None
    for term, _ in runtime:
        bias = _as_bias(term, terms, site, folder)
        if isinstance(bias, Refusal):
            problem = problem or bias
            continue
        rest = tuple(t for t in terms if t is not term)
        if not runtime_tensors(rest, folder):
            return _finish(_Parts(rest, site, folder), (), None, None, bias)
        padding = _padding(rest, site, folder)
        if padding is not None:
            return _padded(rest, site, folder, *padding, bias)
    if problem is not None and len(runtime) == 1:
        return problem
    names = ", ".join(f"'{t.name}'" for _, t in runtime)
    labels = tuple(dict.fromkeys(node_label(t.node) for t, _ in runtime if t.node is not None))
    return Refusal(f"{names} known only at run time: neither key padding nor one bias", labels, site.name)


def _as_bias(term: ScoreTerm, terms: tuple[ScoreTerm, ...], site: ScoreSite, folder: Folder) -> _RunTimeBias | Refusal:
    label = (node_label(term.node),) if term.node is not None else ()
    after = terms[next(i for i, t in enumerate(terms) if t is term) + 1 :]
    before = terms[: len(terms) - len(after) - 1]
    if any(t.kind == "mul" for t in after):
        return Refusal("a run-time bias is scaled after it is added", label, site.name)
    if any(t.kind in ("where", "mul") for t in before):
        return Refusal("a run-time bias is added to masked scores", label, site.name)
    if term.kind == "where":
        if term.fill != -inf or not term.keep:
            return Refusal("a run-time mask with a finite constant, or inverted", label, site.name)
    elif term.kind != "add" or term.negate:
        return Refusal(f"a run-time {term.kind} term", label, site.name)
    assert term.tensor is not None
    tensor = _broadcastable(term.tensor, term, site, folder)
    if tensor is None:
        return Refusal(f"'{term.tensor.name}' does not lie as [B, H, Sq, Skv]", label, site.name)
    hides = term.kind == "where" or _may_hide(term.tensor, folder)
    bias = BiasTerm(BiasKind.DENSE, tensor=tensor, shape=folder.shape(tensor), dtype=folder.dtype(tensor))
    dtype = working_dtype(terms, site)
    constant, complete = lossy_constant(term.tensor, dtype, folder)
    if constant is None:
        return _RunTimeBias(term, bias, hides, "" if complete else unknown_note(term.tensor, dtype))
    if not site.assume_no_empty_rows:
        return Refusal(lossy_reason(constant, dtype), label, site.name)
    return _RunTimeBias(term, bias, hides, NO_EMPTY_ROWS)


def _may_hide(tensor: gs.Tensor, folder: Folder) -> bool:
    """True when the tensor is an input or made with comparisons: its values may be mask constants."""
    stack, seen = [folder.resolve(tensor)], 0
    while stack and seen < 60:
        current = stack.pop()
        seen += 1
        if folder.dtype(current) == np.bool_ or (not current.inputs and not folder.is_static(current)):
            return True
        if current.inputs:
            node = current.inputs[0]
            if node.op in ("MatMul", "Gemm", "Einsum", "Conv", "LayerNormalization"):
                continue
            stack += [folder.resolve(t) for t in node.inputs if not t.is_empty() and not folder.is_static(t)]
    return False


def _broadcastable(tensor: gs.Tensor, term: ScoreTerm, site: ScoreSite, folder: Folder) -> gs.Tensor | None:
    """`tensor`, or a tensor above it, that broadcasts from the right to the scores as the term does."""
    scores = (site.batch, site.heads, site.seq_q, site.seq_kv)
    if term.axes is not None and term.axes != tuple(range(4 - len(term.axes), 4)):
        return None
    for source in sources(tensor, folder):
        if source.scale != 1.0 or source.widened or len(source.shape) > 4:
            continue
        wide = folder.shape(term.view) if term.view is not None else scores
        means = source.view.expand(wide) if wide is not None else None
        means = means.reshape(scores) if means is not None else None
        plain = View.contiguous(source.shape).expand(scores)
        if means is not None and plain is not None and means.reduced() == plain.reduced():
            return source.tensor
    return None
