"""The report for a reader at a terminal: the outcome and the files first, then what it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from stof_onnx.fusion.plan import PlannedRegion
from stof_onnx.report import Report, Site
from stof_onnx.trt.plugin_nodes import SiteLowering
from stof_onnx.trt.region_nodes import RegionLowering
from stof_onnx.verify.result import Verification

_MANY = 12  # equal lines beyond this are counted, not listed


def print_report(report: Report, console: Console) -> None:
    """Prints what happened, where the files are, the verdict, each kind of site, and what was left alone and why."""
    console.print(Text(_headline(report), style="bold"), soft_wrap=True)
    for line in _lines(report):
        console.print(Text(line), soft_wrap=True)


def _lines(report: Report) -> Iterator[str]:
    if report.command == "optimize":
        verb = "nothing was written to" if report.failed else "written:"
        yield f"{verb} {report.output}"
    if report.verification is not None:
        yield from _verification(report.verification)
    elif report.command == "optimize" and report.changed:
        yield "not compared with the original (--no-verify)"
    elif report.command == "optimize":
        yield "not compared: nothing was changed"
    if report.command != "verify":
        yield from _sites(report.sites)
        yield from _refused(report)
    yield from _fusion(report)
    yield from _engine(report)
    for note in report.notes:
        yield f"note: {note}"
    for number, picture in enumerate(report.pictures):
        where = f", drawn in {picture.file}" if picture.file else ""
        yield f"\nmask {number} of {_shorten(picture.sites)}{where}"
        yield picture.text
    yield "time: " + ", ".join(f"{name} {value:.1f} s" for name, value in report.timings.items())


def _fusion(report: Report) -> Iterator[str]:
    fusion = report.fusion
    if fusion is None:
        return
    if fusion.reason:
        yield f"no fused regions: {fusion.reason}"
    if fusion.plan is None or (fusion.reason and not fusion.applied):
        return
    plan = fusion.plan
    kinds = len({a.function for a in fusion.applied})
    source = f"the plan {fusion.source}" if fusion.source else "estimates" if plan.estimated else "times"
    source += "" if fusion.source else f" of {plan.timer}"
    yield f"fused regions: {len(fusion.applied)} of {kinds} kinds, by {source}"
    if not fusion.source:
        ended = "" if plan.complete else ", ended early: the best so far"
        builds = f", {plan.builds} engines built in {plan.build_seconds:.1f} s" if plan.builds else ""
        what = "estimates" if plan.estimated else f"measurements in {plan.seconds:.1f} s"
        yield f"    {plan.samples} {what}{builds}, {plan.cached} from the cache{ended}"
    for note in plan.notes:
        yield f"    not timed: {note}"
    seen = set()
    here = Counter(a.planned.hash for a in fusion.applied)
    for block in plan.blocks.values():
        for region in block.regions:
            if region.hash not in seen and (region.hash in here or not region.kept):
                seen.add(region.hash)
                yield f"    {_region(region, here[region.hash], plan.estimated)}"


def _region(region: PlannedRegion, count: int, estimated: bool) -> str:
    verb = f"fused: {count} x" if region.kept else "not kept:"  # another region may hold its operators
    name = f"{region.template} {region.config}".strip()
    times = "not timed" if region.fused_us is None else f"{region.fused_us:.1f} µs"
    times += "" if region.left_us is None else f", by TensorRT {region.left_us:.1f} µs"
    times += " (estimates)" if estimated else ""
    return f"{verb} {', '.join(region.operators)}: {name}, {times}: {region.reason}"


def _lowered_regions(regions: Sequence[RegionLowering]) -> Iterator[str]:
    """How many regions became plugin nodes, and each reason why one did not."""
    if not regions:
        return
    lowered = sum(1 for r in regions if r.template)
    yield f"lowered to plugin nodes: {lowered} of {_count(len(regions), 'fused region')}"
    for reason, count in Counter(r.reason for r in regions if r.reason and not r.template).items():
        yield f"    {count} x left to TensorRT: {reason}"


def _engine(report: Report) -> Iterator[str]:
    check, result = report.engine_check, report.engine
    if check is not None:
        error = f"largest difference {check.error.max_abs:.2e}, relative {check.error.relative:.2e}"
        yield f"compared with ONNX Runtime at the sizes the engine was tuned for: {error}"
    if report.lowered is not None:
        sites = report.lowered.sites
        yield f"lowered to plugin nodes: {report.lowered.plugins} of {_attentions(len(sites))}"
        yield from _kernels(sites)
        yield from _lowered_regions(report.lowered.regions)
    if report.no_engine:
        yield f"no engine: {report.no_engine}"
    if result is None:
        return
    yield f"engine: {result.path} ({result.kept})"
    for candidate in result.race.candidates:
        if candidate.timing is not None and candidate.engine is not None:
            error = "" if candidate.error is None else f", relative error {candidate.error.relative:.1e}"
            size = f"{len(candidate.engine.data) / 2**20:.1f} MiB, built in {candidate.engine.seconds:.1f} s"
            yield f"    {candidate.kind}: {candidate.timing.median:.4f} ms{error}, {size}"
        if candidate.problem:
            yield f"    {candidate.kind}: {candidate.problem}"
    if result.speedup is not None:
        compared = f"{result.speedup:.2f} times as fast as the plain engine"
        yield f"    {compared}" if result.kept != "plain" else f"    kept without plugins: with them it is {compared}"
    if result.kept == "plain":
        return
    if result.lowered and report.lowered is None:
        yield from _kernels(result.lowered.sites)
    for site in result.lowered.sites if result.lowered else ():
        if not site.kernel:
            yield f"    left to TensorRT: {site.name}: {site.reason}"


def _kernels(sites: Sequence[SiteLowering]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for site in sites:
        if site.kernel:
            groups.setdefault((site.reason, site.profile), []).append(site.name)
    for (reason, profile), names in groups.items():
        yield f"    {len(names)} x {_shorten(names)}: {reason}; device profile: {profile}"


def _headline(report: Report) -> str:
    if report.command == "verify":
        verdict = "does NOT compute the same as" if report.failed else "computes the same as"
        if report.verification is not None and report.verification.broken:
            verdict = "does NOT run like"
        return f"{report.output} {verdict} {report.source}"
    earlier, found = report.replaced_before, report.found
    if not found:
        what = f"{_attentions(earlier)} replaced by an earlier run, no other one" if earlier else "no attention found"
        return f"{report.source}: {what}, nothing to replace"
    verb = "replaced" if report.command == "optimize" else "can be replaced"
    tail = f", {earlier} by an earlier run" if earlier else ""
    return f"{report.source}: {report.replaced} of {_attentions(found)} {verb}{tail}"


def _attentions(count: int) -> str:
    return _count(count, "attention")


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _sites(sites: Sequence[Site]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        groups.setdefault(_description(site), []).append(site)
    for description, group in groups.items():
        errors = [s.max_abs_err for s in group if s.max_abs_err is not None]
        yield f"{len(group)} x {_shorten([s.name for s in group])}"
        for line in description:
            yield f"    {line}"
        if errors:
            yield f"    max error of its output {max(errors):.1e}"
    for text, count in Counter(note for site in sites for note in site.notes).items():
        yield f"note: {text}" + (f" ({count} sites)" if count > 1 else "")


def _description(site: Site) -> tuple[str, ...]:
    mask = f"mask {site.mask}, density {site.density:.1%}"
    if site.tiles:
        mask += ", {full:g} full / {part:g} part / {empty:g} empty tiles a head".format(**site.tiles)
    if site.distinct_masks > 1:
        mask += f", {site.distinct_masks} distinct masks"
    heads = _count(site.heads, "head")
    heads += "" if site.heads == site.kv_heads else f" on {_count(site.kv_heads, 'K/V head')}"
    dim = f"{site.head_dim}" if site.head_dim == site.v_head_dim else f"{site.head_dim} (V {site.v_head_dim})"
    size = f"{'up to ' if site.dynamic_seq else ''}{site.seq_q} x {site.seq_kv}" if site.seq_q else "any length"
    shape = f"{heads} of {dim}, {size}, {site.dtype}, bias {site.bias}"
    return (mask, shape if site.masked_row == "none" else f"{shape}, empty rows {site.masked_row}")


def _refused(report: Report) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for refusal in report.refused:
        reasons.setdefault(refusal.reason, []).append(refusal.site or ", ".join(refusal.nodes))
    for reason, sites in reasons.items():
        yield f"left alone: {_shorten(sites)}: {reason}"


def _verification(result: Verification) -> Iterator[str]:
    seed = "" if result.seed is None else f", seed {result.seed}"
    verdict = "passed" if result.passed else "FAILED"
    sets = _count(len(result.samples), "input set")
    yield f"compared on ONNX Runtime ({result.method}, {sets}{seed}): {verdict}"
    for output in result.outputs[:_MANY]:
        yield f"    {output.name}: largest difference {output.max_abs:.2e}, relative {output.max_rel:.2e}"
    if result.score_bounds:
        worst = max(result.score_bounds, key=lambda b: b.seen / b.bound)
        yield f"    finite mask constants hold for scores up to {worst.bound:.4g}; at most {worst.seen:.4g} seen"
    for line in [*result.failures[:_MANY], *result.notes]:
        yield f"    {line}"


def _shorten(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]}"
