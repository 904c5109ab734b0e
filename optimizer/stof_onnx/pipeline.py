"""The ordered list of steps, nothing else."""

from __future__ import annotations

from pathlib import Path

from stof_onnx.attention.match import find_attention
from stof_onnx.attention.rewrite import replace_attention
from stof_onnx.errors import StofError
from stof_onnx.graph.inputs import apply_shapes
from stof_onnx.graph.model import LoadedModel, load_model
from stof_onnx.graph.save import check_other_targets, check_target, stage_model
from stof_onnx.graph.softmax import rejoin_softmax
from stof_onnx.options import OptimizeOptions
from stof_onnx.pictures import draw_masks
from stof_onnx.progress import Progress
from stof_onnx.report import Report
from stof_onnx.trt.availability import why_no_engine
from stof_onnx.trt.bench import EngineBench, bench_engine
from stof_onnx.trt.engine_step import ENGINE_SUFFIX, build_engines, emit_lowered, verify_engine
from stof_onnx.verify.run import Probes, verify_files, verify_staged


def optimize(path: Path, output: Path, options: OptimizeOptions, progress: Progress) -> Report:
    """Replaces every provably equal attention of the model at `path` and writes the result to `output`.

    The result is compared with the original first (unless `options.verify` is off): a model that fails is not written,
    and the report says so (`report.failed`).

    Raises:
        StofError: bad input, or a comparison that is not possible.
    """
    report = Report("optimize", path, output)
    check_target(output, path)
    check_other_targets(
        {
            "lowered model": options.engine.emit_lowered,
            "engine": _engine_target(options, output),
            "timing cache": options.engine.timing_cache,
            "report": options.report,
        },
        {"input": path, "output": output},
    )
    if options.engine.wanted and (reason := why_no_engine()):
        raise StofError(f"no engine can be built here: {reason}", "--engine", "Leave --engine out for the ONNX file")
    with progress.step("load", report.timings):
        model = load_model(path)
        apply_shapes(model, options.shapes)
        rejoin_softmax(model)
    with progress.step("match", report.timings):
        matches, refusals = find_attention(model, options)
        report.add_matches(model, matches, refusals)
        probes = Probes(matches)
    with progress.step("rewrite", report.timings):
        report.replaced = len(replace_attention(model, matches))
    with progress.step("save", report.timings):
        staged = stage_model(model, output)
    report.notes = model.notes
    with staged:
        if options.verify and report.changed:
            with progress.step("verify", report.timings):
                report.add_verification(verify_staged(model, probes, staged, options))
        if not report.failed:
            staged.commit()
    if not report.failed:
        _engine(report, model, output, options, progress)
    return report


def _engine(report: Report, model: LoadedModel, output: Path, options: OptimizeOptions, progress: Progress) -> None:
    """Lowers and builds as asked for. Without TensorRT or a GPU one line says so, unless an engine was demanded."""
    wishes = options.engine
    if wishes.emit_lowered is not None:
        with progress.step("lower", report.timings):
            report.lowered = emit_lowered(model, output, wishes.emit_lowered, wishes)
    if wishes.wanted is False:
        return
    reason = why_no_engine()
    if not reason:
        try:
            with progress.step("engine", report.timings):
                target = wishes.path or output.with_suffix(ENGINE_SUFFIX)
                report.engine = build_engines(model, output, target, wishes, options.verify, options.seed)
        except StofError as error:
            if wishes.wanted:
                raise
            reason = str(error)
    report.no_engine = reason


def _engine_target(options: OptimizeOptions, output: Path) -> Path | None:
    if options.engine.wanted is False or why_no_engine():
        return options.engine.path
    return options.engine.path or output.with_suffix(ENGINE_SUFFIX)


def inspect(path: Path, options: OptimizeOptions, progress: Progress) -> Report:
    """What `optimize` would do with the model at `path`; writes nothing but the mask pictures that were asked for.

    Raises:
        StofError: bad input.
    """
    report = Report("inspect", path)
    check_other_targets({"report": options.report}, {"input": path})
    with progress.step("load", report.timings):
        model = load_model(path)
        apply_shapes(model, options.shapes)
        rejoin_softmax(model)
    with progress.step("match", report.timings):
        matches, refusals = find_attention(model, options)
        report.add_matches(model, matches, refusals)
        report.replaced = len(matches)
    report.notes = model.notes
    with progress.step("pictures", report.timings):
        report.pictures = draw_masks(matches, options.pictures)
    return report


def verify(path: Path, other: Path, options: OptimizeOptions, progress: Progress) -> Report:
    """Compares the model at `other` with the original at `path`.

    Raises:
        StofError: bad input, or a comparison that is not possible.
    """
    report = Report("verify", path, other)
    check_other_targets({"report": options.report}, {"input": path, "output": other})
    if other.suffix == ENGINE_SUFFIX:
        with progress.step("verify", report.timings):
            report.engine_check = verify_engine(path, other, options.seed)
        return report
    with progress.step("load", report.timings):
        model = load_model(path)
        apply_shapes(model, options.shapes)
        rejoin_softmax(model)
    with progress.step("match", report.timings):
        matches, refusals = find_attention(model, options)
        report.add_matches(model, matches, refusals)
    report.notes = model.notes
    with progress.step("verify", report.timings):
        report.add_verification(verify_files(model, Probes(matches), other, options))
    return report


def bench(engine: Path, against: Path | None, seed: int | None) -> EngineBench:
    """Times the engine, and what it is compared with: another engine or an ONNX model, built plain.

    Raises:
        StofError: TensorRT or a GPU is missing, or an engine does not load.
    """
    return bench_engine(engine, against, seed)
