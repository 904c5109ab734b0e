"""The fusion part of `optimize`: where the plan comes from, and putting its regions into the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stof_onnx.errors import StofError
from stof_onnx.fusion.apply import AppliedRegion, apply_plan
from stof_onnx.fusion.fixed_shapes import fold_fixed_shapes
from stof_onnx.fusion.plan import FusionPlan, read_plan
from stof_onnx.fusion.plan_cache import PlanCache, default_path
from stof_onnx.fusion.programs import region_programs
from stof_onnx.fusion.search import SearchOptions, Timer, search
from stof_onnx.fusion.search.pool import TimerPool
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.fusion.sequence import Block, find_blocks
from stof_onnx.fusion.tensors import Tensors
from stof_onnx.graph.export import ExportedModel
from stof_onnx.graph.model import LoadedModel
from stof_onnx.kernels.triton_rows import Program
from stof_onnx.options import DimRange, FusionWishes, OptimizeOptions
from stof_onnx.progress import Progress
from stof_onnx.trt import availability, cuda
from stof_onnx.trt.region_timer import gpu_timer

_KERNEL_ARCH = 90


@dataclass
class Fusion:
    """What became of the fused regions: the plan and the file it came from, what was applied, or why there is none."""

    plan: FusionPlan | None = None
    source: Path | None = None
    applied: list[AppliedRegion] = field(default_factory=list)
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "plan": self.plan and self.plan.to_json(),
            "source": None if self.source is None else str(self.source),
            "regions": [{"node": a.node, "function": a.function} for a in self.applied],
            "functions": dict(Counter(a.function for a in self.applied)),
            "reason": self.reason,
        }


def check_wishes(wishes: FusionWishes) -> None:
    """Refuses, before any work is done, a plan that can neither be read nor be made.

    Raises:
        StofError: see above.
    """
    if wishes.plan is None or wishes.tune:
        return
    if wishes.plan.exists():
        read_plan(wishes.plan)
    else:
        raise StofError(
            "no such plan, and --no-tune makes none", str(wishes.plan), "Name a plan, or leave --no-tune out"
        )


def fuse(
    model: LoadedModel,
    exported: ExportedModel,
    options: OptimizeOptions,
    attentions: int,
    progress: Progress,
    timings: dict[str, float],
) -> Fusion | None:
    """Puts fused regions into `exported`; None where none are wanted.

    Args:
        model: the model that `exported` was made of.
        attentions: how many were replaced: without any there is nothing to do.

    Raises:
        StofError: the plan file can not be read or written, or sizes are not known for a search that was asked for.
    """
    wishes = options.fusion
    reading = wishes.plan is not None and not wishes.tune
    if not reading and not wishes.tune:
        return None
    if not attentions:
        return Fusion(reason="no attention was replaced")
    with progress.step("fusion", timings):
        sizes = _opt_sizes(model)
        fold_fixed_shapes(exported.proto, exported.initializers, model.base_dir)
        tensors = Tensors(exported.proto, exported.initializers, sizes, model.base_dir)
        result = Fusion()
        if reading and wishes.plan is not None:
            result.plan, result.source = read_plan(wishes.plan), wishes.plan
            if result.plan.precision != options.engine.precision:
                what = f"is for {result.plan.precision}, the engine is {options.engine.precision}"
                raise StofError(what, str(wishes.plan), "Make a plan for this precision, or give --precision")
        else:
            if not sizes:
                result.reason = "the sizes to tune for are not known: give --shape for every dynamic input"
                return result
            result.plan = _search(tensors, options, progress)
            if wishes.plan is not None:
                result.plan.write(wishes.plan)
        result.applied = apply_plan(exported.proto, exported.initializers, tensors, result.plan, model.opset)
        if reading and result.plan.kept and not result.applied:
            result.reason = "the plan is of other models or sizes: none of its blocks is in this one"
    return result


def programs_of(model: LoadedModel, exported: ExportedModel, precision: str) -> list[Program]:
    """The programs that a search on this model may ask kernels for.

    Raises:
        StofError: the sizes to tune for are not known.
    """
    sizes = _opt_sizes(model)
    if not sizes:
        raise StofError(
            "the sizes to tune for are not known", "kernels compile", "Give --shape for every dynamic input"
        )
    fold_fixed_shapes(exported.proto, exported.initializers, model.base_dir)
    return region_programs(Tensors(exported.proto, exported.initializers, sizes, model.base_dir), precision)


def _search(tensors: Tensors, options: OptimizeOptions, progress: Progress) -> FusionPlan:
    precision = options.engine.precision
    blocks = find_blocks(tensors)
    wishes = SearchOptions(budget=options.fusion.budget)
    with ExitStack() as stack:
        timer = _timer(options, blocks, stack)
        cache = stack.enter_context(closing(PlanCache(default_path())))
        watch = stack.enter_context(progress.bar("fusion"))
        return search(blocks, timer, precision, wishes, cache, watch, Roofline(precision))


def _timer(options: OptimizeOptions, blocks: Sequence[Block], stack: ExitStack) -> Timer:
    """The GPU's own times where it can be asked, several GPUs' side by side, else estimates."""
    if availability.why_no_engine():
        return Roofline(options.engine.precision, arch=options.engine.arch or _KERNEL_ARCH)
    timer, gpus = gpu_timer(options.engine), cuda.alike()
    if len(gpus) < 2:
        return timer
    return stack.enter_context(closing(TimerPool(partial(gpu_timer, options.engine), gpus, blocks, timer)))


def _opt_sizes(model: LoadedModel) -> Mapping[str, tuple[int, ...]]:
    """The sizes of every input to tune for; empty where one is not known."""
    given = {t.name for t in model.proto.graph.initializer}
    sizes: dict[str, tuple[int, ...]] = {}
    for value in model.proto.graph.input:
        if value.name in given:
            continue
        dims = [d.dim_value if d.HasField("dim_value") else 0 for d in value.type.tensor_type.shape.dim]
        ranges: tuple[DimRange | None, ...] = model.input_ranges.get(value.name, ())
        known = [r.opt if r is not None else d for d, r in zip(dims, ranges or [None] * len(dims), strict=True)]
        if any(size < 1 for size in known):
            return {}
        sizes[value.name] = tuple(known)
    return sizes
