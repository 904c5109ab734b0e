"""The selection model's figures as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stof_onnx.errors import StofError
from stof_onnx.kernels.device_profile import DeviceProfile

from .judge import WITHIN, Measured, Score, pick, pick_eq1, predicted, scores

BEGIN, END = "<!-- selection: begin -->", "<!-- selection: end -->"
_SHOWN = 14


def report(cases: Sequence[Measured], environment: dict[str, Any], profile: DeviceProfile) -> str:
    """Scores over all kernels and over those for GPUs before Hopper, errors of predictions, and the worst picks.

    Raises:
        StofError: there are no cases.
    """
    if not cases:
        raise StofError("the results hold no case of the set", "evaluate", "Run `selection.py measure` first")
    older = [m.only(("row_wise", "block_sm80")) for m in cases]
    parts = [
        _scores(f"All kernels, {len(cases)} cases", scores(cases, profile)),
        _scores("Without `block_sm90`, on the same GPU", scores(older, profile)),
        _errors(cases, profile),
        f"The {_SHOWN} worst picks of the model, and every pick that is not within {WITHIN - 1:.0%}, all kernels:",
        _worst(cases, profile),
        f"Timed {environment['date']} at commit {environment['commit']} on {environment['gpu']}, driver "
        f"{environment['driver']}; coefficients {profile.origin}.",
    ]
    return "\n\n".join(parts)


def write_between(path: Path, text: str) -> None:
    """Replaces what stands between the two markers of a file.

    Raises:
        StofError: it has no markers.
    """
    old = path.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise StofError("the markers of the selection table are gone", str(path), f"Put {BEGIN} and {END} back")
    head, tail = old.split(BEGIN)[0], old.split(END)[1]
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    temporary.replace(path)


def _scores(title: str, found: Sequence[Score]) -> str:
    rows = [f"| {title} | within 5 % of the best | worst | geometric mean |", "|---|---|---|---|"]
    rows += [f"| {s.name} | {s.within:.1%} | {s.worst:.2f} | {s.mean:.3f} |" for s in found]
    return "\n".join(rows)


def _errors(cases: Sequence[Measured], profile: DeviceProfile) -> str:
    all_, best = [], []
    for m in cases:
        for config, o in m.observations.items():
            error = abs(np.log(predicted(m, config, profile) / o.us))
            all_.append(error)
            if config == m.best:
                best.append(error)
    return (
        f"Error of the predicted times: median {np.median(all_):.1%} over {len(all_)} configurations "
        f"(95 % of them below {np.quantile(all_, 0.95):.0%}), {np.median(best):.1%} on each case's best."
    )


def _worst(cases: Sequence[Measured], profile: DeviceProfile) -> str:
    def ratio(m: Measured) -> float:
        return m.observations[pick(m, profile)].us / m.observations[m.best].us

    ranked = sorted(cases, key=lambda m: -ratio(m))
    shown = ranked[: max(_SHOWN, sum(ratio(m) > WITHIN for m in cases))]
    rows = [
        "| case | density | best | µs | this model | µs (predicted) | Eq. 1 | µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for m in shown:
        ours, paper = pick(m, profile), pick_eq1(m, lambda b: b.best)
        rows.append(
            f"| {m.case.key} | {m.density:.3f} | {m.best.label} | {m.observations[m.best].us:.1f} | {ours.label} | "
            f"{m.observations[ours].us:.1f} ({predicted(m, ours, profile):.1f}) | {paper.label} | "
            f"{m.observations[paper].us:.1f} |"
        )
    return "\n".join(rows)
