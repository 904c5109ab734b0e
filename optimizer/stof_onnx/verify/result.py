"""What the comparison of original and optimized model found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class OutputError:
    """Errors of one tensor over all samples.

    Attributes:
        max_abs: largest |optimized - original|.
        max_rel: the same, each sample's over the largest magnitude in the original's tensor.
        limit: what `max_abs` may be.
        own_error, optimized_error: largest error of the original and of the optimized model against a run of the
            original in higher precision; only measured when `max_abs` exceeds `limit`.
        problem: why the tensor failed, "" when it passed: the sample with the largest difference, unless something
            else than a difference is wrong.
    """

    name: str
    dtype: str
    max_abs: float = 0.0
    max_rel: float = 0.0
    limit: float = 0.0
    own_error: float | None = None
    optimized_error: float | None = None
    problem: str = ""
    _told: float = field(default=-math.inf, repr=False)  # the difference that `problem` tells of

    def fail(self, problem: str, difference: float = math.inf) -> None:
        """Notes why a sample failed, and how large its difference is; infinite where that is not what is wrong."""
        if difference > self._told:
            self.problem, self._told = problem, difference

    def to_json(self) -> dict[str, Any]:
        """Plain values for the report."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


@dataclass
class ScoreBound:
    """Finite mask constants of a site are masks for |score| <= `bound`; `seen` bounds the scores in these runs."""

    site: str
    bound: float
    seen: float

    @property
    def passed(self) -> bool:
        return self.seen <= self.bound


@dataclass
class Verification:
    """The verdict and what it rests on.

    Attributes:
        method: "whole model", or "sites on sampled rows" where the whole would take too much memory.
        rule: the tolerance, in words.
        samples: one line for each input set.
        outputs: graph outputs.
        broken: why the optimized model does not run where the original does, "" when it does.
        sites: each attention's own output where both models expose it, by site name.
    """

    method: str
    rule: str
    seed: int | None
    samples: list[str] = field(default_factory=list)
    outputs: list[OutputError] = field(default_factory=list)
    sites: dict[str, OutputError] = field(default_factory=dict)
    score_bounds: list[ScoreBound] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: str = ""

    @property
    def failures(self) -> list[str]:
        """One line for each thing that failed."""
        lines = [f"the optimized model does not run: {self.broken}"] if self.broken else []
        lines += [f"output '{o.name}': {o.problem}" for o in self.outputs if o.problem]
        lines += [f"attention '{site}': {o.problem}" for site, o in self.sites.items() if o.problem]
        lines += [
            f"attention '{b.site}': scores up to {b.seen:.4g} were seen, its mask constants only hold to {b.bound:.4g}"
            for b in self.score_bounds
            if not b.passed
        ]
        return lines

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def site_errors(self) -> dict[str, float]:
        """Largest absolute error of each attention's own output."""
        return {site: error.max_abs for site, error in self.sites.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain values for the report."""
        return {
            "passed": self.passed,
            "method": self.method,
            "tolerance": self.rule,
            "seed": self.seed,
            "samples": self.samples,
            "outputs": [o.to_json() for o in self.outputs],
            "score_bounds": [vars(b) | {"passed": b.passed} for b in self.score_bounds],
            "failures": self.failures,
            "notes": self.notes,
        }
