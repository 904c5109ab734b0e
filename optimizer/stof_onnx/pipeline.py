"""The ordered list of steps, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stof_onnx.attention.match import find_attention
from stof_onnx.attention.rewrite import replace_attention
from stof_onnx.errors import StofError
from stof_onnx.files import check_source
from stof_onnx.graph.export import export_model
from stof_onnx.graph.inputs import apply_shapes
from stof_onnx.graph.model import LoadedModel, load_model
from stof_onnx.graph.read import read_proto
from stof_onnx.graph.save import check_data_files, check_other_targets, check_target, data_file, stage_model
from stof_onnx.graph.softmax import rejoin_softmax
from stof_onnx.kernels.triton_rows import Program
from stof_onnx.options import OptimizeOptions
from stof_onnx.pictures import draw_masks
from stof_onnx.progress import Progress
from stof_onnx.report import Report
from stof_onnx.trt.availability import why_no_engine
from stof_onnx.trt.bench import EngineBench, bench_engine
from stof_onnx.trt.engine_step import (
    ENGINE_SUFFIX,
    build_engines,
    check_bounds,
    check_portable,
    emit_lowered,
    is_engine,
    verify_engine,
)
from stof_onnx.trt.fusion_step import check_wishes, fuse, programs_of
from stof_onnx.trt.manifest import manifest_of
from stof_onnx.verify.run import Probes, verify_files, verify_staged


def optimize(path: Path, output: Path, options: OptimizeOptions, progress: Progress) -> Report:
    """Replaces every provably equal attention of the model at `path` and writes the result to `output`.

    The result is compared with the original first (unless `options.verify` is off): a model that fails is not written,
    and the report says so (`report.failed`).

    Raises:
        StofError: bad input, or a comparison that is not possible.
    """
    report = Report("optimize", path, output)
    if is_engine(output):
        raise StofError("is to be the ONNX file's name", f"-o {output}", "Name the engine with --engine FILE")
    if options.load_outputs is not None and options.engine.wanted is False:
        raise StofError("is for engines", "--load-outputs", "Leave it or --no-engine out")
    check_target(output, path)
    targets = _other_targets(options, output)
    taken = {"input": path, "output": output, "output's data": data_file(output), **_loaded(options)}
    check_other_targets(targets, taken)
    if options.engine.wanted and (reason := why_no_engine()):
        raise StofError(f"no engine can be built here: {reason}", "--engine", "Leave --engine out for the ONNX file")
    check_wishes(options.fusion)
    with progress.step("load", report.timings):
        model = load_model(path)
        check_data_files(targets, model.proto, model.base_dir)
        apply_shapes(model, options.shapes)
        if options.engine.wanted or options.engine.emit_lowered is not None:
            check_bounds(model)
        rejoin_softmax(model)
    with progress.step("match", report.timings):
        matches, refusals = find_attention(model, options)
        report.add_matches(model, matches, refusals)
        probes = Probes(matches)
    with progress.step("rewrite", report.timings):
        report.replaced = len(replace_attention(model, matches))
    exported = export_model(model)
    report.notes = model.notes
    report.fusion = fuse(model, exported, options, report.replaced, progress, report.timings)
    with progress.step("save", report.timings):
        staged = stage_model(model, output, exported)
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
                report.engine = build_engines(model, output, target, options)
        except StofError as error:
            if wishes.wanted:
                raise
            reason = str(error)
    report.no_engine = reason
    if reason and options.load_outputs is not None:
        report.notes.append("--load-outputs was not used: it is for engines")


def _other_targets(options: OptimizeOptions, output: Path) -> dict[str, Path | None]:
    """Every file that a run of `optimize` may write beside its output."""
    wishes, engine = options.engine, options.engine.path
    if engine is None and wishes.wanted is not False and not why_no_engine():
        engine = output.with_suffix(ENGINE_SUFFIX)
    return {
        "lowered model": wishes.emit_lowered,
        "lowered model's data": wishes.emit_lowered and data_file(wishes.emit_lowered),
        "engine": engine,
        "engine's manifest": engine and manifest_of(engine),
        "timing cache": wishes.timing_cache,
        "plan": options.fusion.plan,
        "report": options.report,
    }


def _loaded(options: OptimizeOptions) -> dict[str, Path | None]:
    """The files that a comparison reads.

    Raises:
        StofError: one of them is no file, or outputs without the inputs that they belong to.
    """
    if options.load_outputs is not None and options.load_inputs is None:
        raise StofError("needs the inputs that the outputs belong to", "--load-outputs", "Give --load-inputs as well")
    for file in (options.load_inputs, options.load_outputs):
        if file is not None:
            check_source(file)
    return {"loaded inputs": options.load_inputs, "loaded outputs": options.load_outputs}


def row_programs(path: Path, options: OptimizeOptions, precisions: Sequence[str], progress: Progress) -> list[Program]:
    """What kernels of fused regions a search on the model at `path` may ask for, in engines of these precisions.

    Raises:
        StofError: bad input, or sizes that are not known.
    """
    timings: dict[str, float] = {}
    with progress.step("load", timings):
        model = load_model(path)
        apply_shapes(model, options.shapes)
        rejoin_softmax(model)
    with progress.step("match", timings):
        replace_attention(model, find_attention(model, options)[0])
    exported = export_model(model)
    with progress.step("regions", timings):
        found = [program for precision in precisions for program in programs_of(model, exported, precision)]
    return list(dict.fromkeys(found))


def inspect(path: Path, options: OptimizeOptions, progress: Progress) -> Report:
    """What `optimize` would do with the model at `path`; writes nothing but the mask pictures that were asked for.

    Raises:
        StofError: bad input.
    """
    report = Report("inspect", path)
    targets = {"report": options.report}
    check_other_targets(targets, {"input": path})
    with progress.step("load", report.timings):
        model = load_model(path)
        check_data_files(targets, model.proto, model.base_dir)
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
    targets = {"report": options.report}
    check_other_targets(targets, {"input": path, "compared": other, **_loaded(options)})
    if is_engine(other):
        unused = {"--shape": options.shapes, "--atol": options.atol, "--rtol": options.rtol}
        if given := [name for name, value in unused.items() if value not in (None, ())]:
            advice = "It is run at the sizes it was tuned for, and judged by what its precision allows"
            raise StofError("does not apply to an engine", given[0], advice)
        with progress.step("verify", report.timings):
            report.engine_check = verify_engine(path, other, options)
        return report
    if options.load_outputs is not None:
        raise StofError("is for engines", "--load-outputs", "Two models are both run on ONNX Runtime")
    with progress.step("load", report.timings):
        model = load_model(path)
        check_data_files(targets, model.proto, model.base_dir)
        compared = read_proto(other)
        check_portable(compared, other)
        check_data_files(targets, compared, other.parent)
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
