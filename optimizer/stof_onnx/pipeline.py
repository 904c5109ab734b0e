"""The ordered list of steps, nothing else."""

from __future__ import annotations

from pathlib import Path

from stof_onnx.attention.match import find_attention
from stof_onnx.attention.rewrite import replace_attention
from stof_onnx.graph.inputs import apply_shapes
from stof_onnx.graph.model import load_model
from stof_onnx.graph.save import check_target, stage_model
from stof_onnx.mask.gallery import draw_masks
from stof_onnx.options import OptimizeOptions
from stof_onnx.progress import Progress
from stof_onnx.report import Report
from stof_onnx.verify import verify_staged


def optimize(path: Path, output: Path, options: OptimizeOptions, progress: Progress) -> Report:
    """Replaces every provably equal attention of the model at `path` and writes the result to `output`.

    The result is compared with the original first (unless `options.verify` is off) and only written when it passes.

    Raises:
        StofError: bad input, or (VerificationFailed) the result does not compute what the original does.
    """
    report = Report(source=path, output=output)
    check_target(output, path)
    with progress.step("load", report):
        model = load_model(path)
    with progress.step("shapes", report):
        apply_shapes(model, options.shapes)
    with progress.step("match", report):
        matches, refusals = find_attention(model, options)
        report.add_matches(model, matches, refusals)
    with progress.step("rewrite", report):
        report.add_replaced(replace_attention(model, matches))
    with progress.step("save", report):
        staged = stage_model(model, output)
    with staged:
        if options.verify:
            with progress.step("verify", report):
                report.add_verification(verify_staged(model, staged, matches, options))
        staged.commit()
    return report


def inspect(path: Path, options: OptimizeOptions, progress: Progress) -> Report:
    """What `optimize` would find in the model at `path`; writes nothing but the mask pictures that were asked for.

    Raises:
        StofError: bad input.
    """
    report = Report(source=path)
    with progress.step("load", report):
        model = load_model(path)
    with progress.step("shapes", report):
        apply_shapes(model, options.shapes)
    with progress.step("match", report):
        matches, refusals = find_attention(model, options)
        report.add_matches(model, matches, refusals)
    with progress.step("pictures", report):
        report.add_pictures(draw_masks(matches, options.pictures))
    return report
