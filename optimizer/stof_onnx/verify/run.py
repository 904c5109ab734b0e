"""The two uses of the comparison: a model that is about to be written, and two files."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import psutil

from stof_onnx.attention.types import AttentionMatch
from stof_onnx.errors import StofError
from stof_onnx.fusion.functions import PREFIX as FUSED_REGION
from stof_onnx.graph.model import LoadedModel
from stof_onnx.graph.read import read_valid
from stof_onnx.graph.save import StagedModel
from stof_onnx.options import DimRange, OptimizeOptions
from stof_onnx.verify.compare import Side, SiteProbe, compare_models
from stof_onnx.verify.loaded import loaded_samples
from stof_onnx.verify.memory import sampled_rows, whole_models
from stof_onnx.verify.result import Verification
from stof_onnx.verify.roles import input_roles
from stof_onnx.verify.rows import METHOD as ROWS
from stof_onnx.verify.rows import compare_rows
from stof_onnx.verify.samples import Sample, VisibleKeys, make_samples
from stof_onnx.verify.unchanged import first_change
from stof_onnx.verify.upcast import uses_bfloat16, without_bfloat16

_SHARE_OF_FREE_MEMORY = 0.6


class Probes:
    """What has to be remembered of the matches before the rewrite edits the graph they point into."""

    def __init__(self, matches: Sequence[AttentionMatch]) -> None:
        self.sites = [SiteProbe.of(m) for m in matches]
        self.paddings = [m.kv_mask.tensor.name for m in matches if m.kv_mask.tensor is not None]
        self.visible = VisibleKeys.of(matches)


def verify_staged(model: LoadedModel, probes: Probes, staged: StagedModel, options: OptimizeOptions) -> Verification:
    """Compares the file that `model` came from with the staged result.

    Raises:
        StofError: the comparison is not possible.
    """
    original = model.proto
    if model.source_opset != model.opset:  # against the file itself, not against our conversion of it
        original, _ = read_valid(model.path)
    other = Side.read(staged.path)
    result = _verify(Side(original, model.base_dir), other, probes, model.input_ranges, options)
    if result.method == ROWS and any(n.op_type.startswith(FUSED_REGION) for n in other.proto.graph.node):
        result.notes.append("fused regions are made of the original's operators: they were not compared")
    return result


def verify_files(model: LoadedModel, probes: Probes, optimized: Path, options: OptimizeOptions) -> Verification:
    """Compares a loaded original with the model in another file.

    Raises:
        StofError: the comparison is not possible.
    """
    original, other = Side(model.proto, model.base_dir), Side.read(optimized)
    result = _verify(original, other, probes, model.input_ranges, options)
    if result.method != ROWS or not result.passed:
        return result
    if change := first_change(original, other, [site.output for site in probes.sites]):
        what = f"is too large to be run as a whole, and {change} is not in the original: it was not compared"
        raise StofError(what, str(optimized), "Give smaller sizes with --shape, or raise --memory-limit")
    return replace(result, notes=[*result.notes, "everything else is the same in both files"])


def _verify(
    original: Side,
    optimized: Side,
    probes: Probes,
    ranges: Mapping[str, tuple[DimRange | None, ...]],
    options: OptimizeOptions,
) -> Verification:
    note = ""
    if uses_bfloat16(original.proto):
        note = "compared in float32: ONNX Runtime computes nothing in bfloat16 on a CPU"
        original, optimized = (
            Side(without_bfloat16(side.proto, side.base_dir), side.base_dir) for side in (original, optimized)
        )
    result = _compare(original, optimized, probes, ranges, options)
    return replace(result, notes=[*result.notes, note]) if note else result


def _compare(
    original: Side,
    optimized: Side,
    probes: Probes,
    ranges: Mapping[str, tuple[DimRange | None, ...]],
    options: OptimizeOptions,
) -> Verification:
    limit = options.memory_limit or int(psutil.virtual_memory().available * _SHARE_OF_FREE_MEMORY)
    seed, samples = _samples(original.proto, probes, ranges, options, largest=False)
    if whole_models(original.proto, probes.sites, samples) <= limit:
        return compare_models(original, optimized, probes.sites, samples, seed, options)
    need = sampled_rows(probes.sites)
    if need > limit:
        what = f"needs about {need / 2**20:.1f} MiB, more than the {limit / 2**20:.1f} MiB it may take"
        raise StofError(what, "verify", "Give smaller sizes with --shape, raise --memory-limit, or pass --no-verify")
    seed, samples = _samples(original.proto, probes, ranges, options, largest=True)
    if not probes.paddings:  # masks that no input changes
        samples = samples[:1]
    return compare_rows(original, optimized, probes.sites, samples, seed, options)


def _samples(
    proto: onnx.ModelProto,
    probes: Probes,
    ranges: Mapping[str, tuple[DimRange | None, ...]],
    options: OptimizeOptions,
    largest: bool,
) -> tuple[int | None, list[Sample]]:
    """The seed (None for inputs from a file) and the input sets; `largest`: only the largest sizes."""
    if options.load_inputs is not None:
        return None, loaded_samples(options.load_inputs, proto)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    roles = input_roles(proto, probes.paddings)
    keep_rows = probes.visible if options.assume_no_empty_rows else None
    if largest:
        ranges = {name: tuple(r and DimRange(r.max, r.max, r.max) for r in dims) for name, dims in ranges.items()}
    return seed, make_samples(roles, ranges, options.samples, keep_rows, np.random.default_rng(seed))
