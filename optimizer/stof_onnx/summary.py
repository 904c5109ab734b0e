"""The report for a reader at a terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stof_onnx.report import Report, Site
from stof_onnx.verify.result import Verification

_COLUMNS = ("sites", "mask", "density", "tiles full/part/empty", "heads", "dim", "S_q x S_kv", "bias", "empty rows")
_MANY = 12  # equal lines beyond this are counted, not listed


def print_report(report: Report, console: Console) -> None:
    """Prints what happened, the sites in a table, what was refused and why, and the verdict."""
    console.print(f"[bold]{escape(_headline(report))}[/bold]", highlight=False)
    for note in report.notes:
        console.print(f"  note: {escape(note)}", highlight=False)
    if report.command != "verify":
        _print_sites(report, console)
        _print_refused(report, console)
    for number, picture in enumerate(report.pictures):
        where = f", drawn in {picture.file}" if picture.file else ""
        console.print(f"\nmask {number} of {escape(_shorten(picture.sites))}{escape(str(where))}", highlight=False)
        console.print(escape(picture.text), highlight=False, no_wrap=True, crop=False)
    if report.verification is not None:
        _print_verification(report.verification, console)
    elif report.command == "optimize" and not report.changed:
        console.print("not compared: nothing was changed")
    elif report.command == "optimize":
        console.print("not compared with the original (--no-verify)")
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in report.timings.items())
    console.print(f"time: {seconds}", highlight=False)
    if report.command == "optimize":
        if report.failed:
            console.print(f"[bold]nothing was written to {escape(str(report.output))}[/bold]", highlight=False)
        else:
            console.print(f"written: [bold]{escape(str(report.output))}[/bold]", highlight=False)


def _headline(report: Report) -> str:
    if report.command == "verify" and report.verification is not None:
        verdict = "computes the same as" if report.verification.passed else "does NOT compute the same as"
        return f"{report.output} {verdict} {report.source}"
    if not report.found:
        return f"{report.source}: no attention found, nothing to replace"
    count = report.replaced if report.command == "optimize" else len(report.sites)
    verb = "replaced" if report.command == "optimize" else "can be replaced"
    tail = "" if count else ", nothing to replace"
    return f"{report.source}: {count} of {report.found} attention{'s' if report.found > 1 else ''} {verb}{tail}"


def _print_sites(report: Report, console: Console) -> None:
    if not report.sites:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    if report.verification is not None:
        table.add_column("max error")
    groups: dict[tuple[str, ...], list[Site]] = {}
    for site in report.sites:
        groups.setdefault(_columns(site), []).append(site)
    for columns, sites in groups.items():
        errors = [s.max_abs_err for s in sites if s.max_abs_err is not None]
        error = [f"{max(errors):.1e}" if errors else "-"] if report.verification is not None else []
        table.add_row(escape(_shorten(tuple(s.name for s in sites))), *columns, *error)
    console.print(table)
    for text, count in Counter(note for site in report.sites for note in site.notes).items():
        console.print(f"  {escape(text)}" + (f" ({count} sites)" if count > 1 else ""), highlight=False)


def _columns(site: Site) -> tuple[str, ...]:
    tiles = "-"
    if site.tiles:
        tiles = " / ".join(f"{site.tiles[kind]:g}" for kind in ("full", "part", "empty"))
    heads = str(site.heads) if site.heads == site.kv_heads else f"{site.heads} on {site.kv_heads}"
    dim = str(site.head_dim) if site.head_dim == site.v_head_dim else f"{site.head_dim}, {site.v_head_dim}"
    size = "any" if not site.seq_q else f"{'up to ' if site.dynamic_seq else ''}{site.seq_q} x {site.seq_kv}"
    return site.mask, f"{site.density:.1%}", tiles, heads, dim, size, site.bias, site.masked_row


def _print_refused(report: Report, console: Console) -> None:
    reasons: dict[str, list[str]] = {}
    for refusal in report.refused:
        reasons.setdefault(refusal.reason, []).append(refusal.site or ", ".join(refusal.nodes))
    for reason, sites in reasons.items():
        console.print(f"  left alone: {escape(_shorten(tuple(sites)))}: {escape(reason)}", highlight=False)


def _print_verification(result: Verification, console: Console) -> None:
    verdict = "passed" if result.passed else "FAILED"
    seed = "" if result.seed is None else f", seed {result.seed}"
    console.print(f"compared on ONNX Runtime ({result.method}, {len(result.samples)} input sets{seed}): {verdict}")
    for output in result.outputs[:_MANY]:
        console.print(
            f"  {escape(output.name)}: largest difference {output.max_abs:.2e}, relative {output.max_rel:.2e}",
            highlight=False,
        )
    if result.score_bounds:
        worst = max(result.score_bounds, key=lambda b: b.seen / b.bound)
        console.print(
            f"  finite mask constants hold for scores up to {worst.bound:.4g}; at most {worst.seen:.4g} seen",
            highlight=False,
        )
    for line in [*result.failures[:_MANY], *result.notes]:
        console.print(f"  {escape(line)}", highlight=False)


def _shorten(names: tuple[str, ...]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"
