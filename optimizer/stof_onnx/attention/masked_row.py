"""What the original computes for a row whose every key is masked, from the constants' own arithmetic.

With finite constants a row without keys is not empty in the original: added constants that the dtype can still tell
from the scores shift them all alike (`scores`), constants that swallow the scores leave equal entries (`mean`), and
-inf everywhere is 0/0 (`nan`, or `zero` behind a NaN guard).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from stof_onnx.attention.types import MaskedRow, ScoreSite, ScoreTerm

_PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
# Half a unit in the last place: above the first every score is swallowed (-65504 in float16 and -1e9 in float32 spare
# those of 16 and 32), below the second none is visibly changed.
SWALLOWS, KEEPS = 1000.0, 2.0**-8


@dataclass(frozen=True)
class RowRule:
    """The meaning of rows without keys up to |score| = `bound`, or the reason why no rule has it."""

    rule: MaskedRow | None
    bound: float = np.inf
    reason: str = ""


def mask_threshold(dtype: np.dtype) -> float:
    """The largest added constant that counts as a mask: -1e4 as the dtype writes it."""
    return float(np.asarray(-1e4).astype(dtype))


def working_dtype(terms: tuple[ScoreTerm, ...], site: ScoreSite) -> np.dtype:
    """The coarsest float type that a masked score passes through."""
    kinds = [t.dtype for t in terms if t.kind in ("add", "cast", "mul")] + [site.softmax_dtype]
    return min(kinds, key=lambda d: _PRECISION.get(np.dtype(d).name, 53))


def half_ulp(value: float, dtype: np.dtype) -> float:
    """Half the distance to the next number of `dtype` at `value`."""
    if value == 0 or not np.isfinite(value):
        return 0.0
    return float(2.0 ** (np.frexp(abs(value))[1] - _PRECISION[np.dtype(dtype).name] - 1))


class RowClassifier:
    """Collects the masked entries that a row without keys can consist of, and names the rule they agree on."""

    def __init__(self, dtype: np.dtype, nan_guard: bool) -> None:
        self.dtype, self.nan_guard = dtype, nan_guard
        self.found: set[tuple[bool, float]] = set()  # (score still in it, value); -inf is (False, -inf)
        self.mixed = False
        self.bound = np.inf

    def add_rows(self, kept: np.ndarray, added: np.ndarray) -> None:
        """Every entry of the rows given ([rows, keys]) can be in one empty row with the others of its row."""
        if added.size == 0:
            return
        low, high = added.min(axis=-1), added.max(axis=-1)
        if (low != high).any():
            self.mixed = True
        # A score that the constant swallows counts as replaced.
        half = np.frompyfunc(lambda v: half_ulp(float(v), self.dtype), 1, 1)(np.unique(low))
        swallowed = {float(v) for v, h in zip(np.unique(low), half, strict=True) if h >= SWALLOWS or v == -np.inf}
        self.bound = min([self.bound, *(h for h in half if h >= SWALLOWS)])
        lost = np.isin(low.astype(np.float64), list(swallowed))
        present = kept.any(axis=-1) & ~lost
        if (present & ~kept.all(axis=-1)).any():
            self.mixed = True
        pairs = np.stack([present.astype(np.float64).ravel(), low.astype(np.float64).ravel()], axis=1)
        self.found |= {(bool(k), float(v)) for k, v in np.unique(pairs, axis=0)}

    def result(self) -> RowRule:
        """The one rule for all rows added."""
        if not self.found:
            return RowRule(MaskedRow.ZERO)
        if self.mixed:
            return RowRule(None, reason="a row without keys mixes different mask constants")
        rules = [self._rule(kept, value) for kept, value in sorted(self.found)]
        kinds = {r.rule for r in rules}
        if len(kinds) > 1:
            return RowRule(None, reason="rows without keys do not all have the same meaning")
        missing = next((r for r in rules if r.rule is None), None)
        return missing or RowRule(rules[0].rule, min(r.bound for r in rules))

    def _rule(self, kept: bool, value: float) -> RowRule:
        if value == -np.inf:
            return RowRule(MaskedRow.ZERO if self.nan_guard else MaskedRow.NAN)
        if not kept:
            return RowRule(MaskedRow.MEAN, self.bound)
        if half_ulp(value, self.dtype) <= KEEPS:
            return RowRule(MaskedRow.SCORES)
        return RowRule(None, reason=f"{value:g} added in {np.dtype(self.dtype).name} keeps only part of each score")
