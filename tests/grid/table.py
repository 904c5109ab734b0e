"""docs/grid.md from the outcomes of the last whole run: `python -m tests.grid.table`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.grid.outcome import STATUSES, Outcome, SiteOutcome
from tests.grid.run import load

PEERS = {"ort": "onnxruntime.transformers optimizer", "onnxscript": "onnxscript's fusions for ONNX Runtime"}
TEMPLATE = """\
# The grid of exports

Written by `make grid`. Every pair of architecture, exporter, attention implementation, mask, way of giving the mask,
padding, dynamic axes and dtype that can occur together occurs in some row (`models/stof_models/grid.py`). The exporter
declares its attention sites and their masks; each replaced site's mask is decoded and compared element by element, and
the outputs of both files are compared on ONNX Runtime with valid, padded and resized inputs: the largest difference
may be 2e-5 of the output's magnitude in fp32, 1e-2 in fp16.

```text
{totals}
{revisions}

{peers}
```

`dense`: replaced, but a float mask that is put together at run time (a constant plus padding) is still a dense input of
the node, so no tile is skipped.

## Why sites are left alone

| sites | mask | reason |
|---|---|---|
{reasons}

## Every export

The last two columns: sites that became one com.microsoft operator, the best of several settings of each peer, and what
is wrong with the result where it can not be used (`benchmarks/peers.py`; – where no peer was run yet). The mask stays a
dense input there. sdpa at opset 23 arrives as one ONNX `Attention`, which neither turns into another operator.

| export | declared sites | stof-onnx | ort | onnxscript |
|---|---|---|---|---|
{rows}

## Exports that fail without us

{failures}

| export | message |
|---|---|
{failed}
"""
DOCUMENT = Path(__file__).parents[2] / "docs" / "grid.md"


def totals(outcomes: Iterable[Outcome]) -> str:
    """The lines that matter, for a terminal and for the document."""
    outcomes = list(outcomes)
    exported = [o for o in outcomes if not o.export_error]
    sites = [site for o in exported for site in o.sites]
    lines = [
        f"{len(outcomes)} exports, {len(outcomes) - len(exported)} of which the exporter itself fails on",
        f"{len(sites)} attention sites: {_counts(sites)}",
        f"{_share('mask known offline, or none', [s for s in sites if s.static])}",
        f"{_share('with run-time padding', [s for s in sites if not s.static])}",
        f"{sum(s.assumed for s in sites)} of the refused are replaced under --assume-no-empty-rows",
        f"{sum(bool(o.errors) for o in exported)} exports with a wrong mask, a wrong result or a site not found",
    ]
    return "\n".join(lines)


def static_share(outcomes: Iterable[Outcome]) -> float:
    """Which part of the sites with a statically known mask (or none) is replaced."""
    static = [site for o in outcomes if not o.export_error for site in o.sites if site.static]
    return sum(site.status == "replaced" for site in static) / max(1, len(static))


def render(outcomes: list[Outcome]) -> str:
    """The whole document."""
    refused = [site for o in outcomes for site in o.sites if site.status == "refused"]
    reasons = Counter((site.static, site.reason) for site in refused)
    failures = Counter(o.export_error for o in outcomes if o.export_error)
    rows = [f"| {o.name} | {_declared(o)} | {_ours(o)} | {_peers(o)} |" for o in outcomes if not o.export_error]
    failed = [f"| {o.name} | {_cell(o.export_error)} |" for o in outcomes if o.export_error]
    return TEMPLATE.format(
        totals=totals(outcomes),
        peers=_peer_totals(outcomes),
        revisions=_revisions(outcomes),
        reasons="\n".join(
            f"| {count} | {'known offline' if static else 'with run-time padding'} | {_cell(reason)} |"
            for (static, reason), count in reasons.most_common()
        ),
        rows="\n".join(rows),
        failures=f"{len(failed)} exports, {len(failures)} messages.",
        failed="\n".join(failed),
    )


def _peer_totals(outcomes: list[Outcome]) -> str:
    """Sites that each peer fuses in results that run and are right, of the exports it was run on."""
    lines = []
    for name, title in PEERS.items():
        ran = [o for o in outcomes if name in o.peers and not o.export_error]
        texts = [o.peers[name] for o in ran]
        exporters = ", ".join(sorted({re.findall(r"ts\d+|dyn\d+", o.name)[0] for o in ran}))
        fused = sum(int(text.split(" ")[0]) for text in texts if "," not in text)
        ours = sum(site.status == "replaced" for o in ran for site in o.sites)
        lines.append(
            f"{title}: {fused} of {sum(len(o.sites) for o in ran)} sites of {len(ran)} exports ({exporters}) fused "
            f"(stof-onnx: {ours} there), {sum(',' in text for text in texts)} results wrong, not running or not made"
        )
    return "\n".join(lines)


def _revisions(outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.revision or "unknown" for outcome in outcomes)
    return "seen with: " + ", ".join(f"{count} at {revision}" for revision, count in counts.most_common())


def _share(what: str, sites: list[SiteOutcome]) -> str:
    replaced = sum(site.status == "replaced" for site in sites)
    return f"{what}: {replaced} of {len(sites)} replaced ({replaced / max(1, len(sites)):.1%})"


def _counts(sites: list[SiteOutcome]) -> str:
    counts = Counter(site.status for site in sites)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def _declared(outcome: Outcome) -> str:
    return ", ".join(f"{n} x {mask}" for mask, n in Counter(site.mask for site in outcome.sites).items())


def _ours(outcome: Outcome) -> str:
    if outcome.errors:
        return f"**wrong**: {_cell(outcome.errors[0])}"
    return _counts(outcome.sites)


def _peers(outcome: Outcome) -> str:
    return " | ".join(outcome.peers.get(name, "–") for name in PEERS)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write() -> None:
    """Writes docs/grid.md."""
    outcomes = load()
    DOCUMENT.write_text(render(outcomes), encoding="utf-8")
    print(totals(outcomes))
    print(f"written: {DOCUMENT}")


if __name__ == "__main__":
    write()
