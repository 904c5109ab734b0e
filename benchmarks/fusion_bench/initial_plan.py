"""The plan of the search's initial scheme: every usual subgraph is a region, nothing is judged."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
from stof_onnx import pipeline
from stof_onnx.fusion.fixed_shapes import fold_fixed_shapes
from stof_onnx.fusion.plan import BlockPlan, FusionPlan, PlannedRegion
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.initial import initial_choice
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.fusion.segment import block_hash
from stof_onnx.fusion.sequence import Block, find_blocks
from stof_onnx.fusion.tensors import Tensors
from stof_onnx.options import EngineWishes, OptimizeOptions
from stof_onnx.progress import Progress


def write_initial_plan(source: Path, target: Path) -> None:
    """That of the model `source`, whose attentions are replaced for it in a temporary file."""
    with tempfile.TemporaryDirectory(dir=source.parent) as work:
        portable = Path(work) / "model.stof.onnx"
        wishes = OptimizeOptions(verify=False, engine=EngineWishes(wanted=False))
        pipeline.optimize(source, portable, wishes, Progress())
        initial_plan(portable).write(target)


def initial_plan(portable: Path, precision: str = "fp16") -> FusionPlan:
    """For a model with fixed sizes whose attentions are replaced; each region has its most promising configuration."""
    model = onnx.load(str(portable), load_external_data=False)
    sizes = {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.input}
    ledger = Ledger(Roofline(precision))
    initializers = list(model.graph.initializer)
    fold_fixed_shapes(model, initializers, portable.parent)
    blocks = find_blocks(Tensors(model, initializers, sizes, portable.parent))
    kinds = {block_hash(block): block for block in blocks}
    plans = {key: _plan(key, block, ledger) for key, block in kinds.items()}
    found = {key: plan for key, plan in plans.items() if plan.regions}
    return FusionPlan(f"initial scheme, {ledger.timer.name}", precision, found)


def _plan(key: str, block: Block, ledger: Ledger) -> BlockPlan:
    space = BlockSpace(block, ledger)
    choice, regions = initial_choice(space), []
    for span, region in sorted(choice.items()):
        config = ledger.configs(region)[0]
        us, names = ledger.fused(region, config), tuple(o.op for o in region.segment.operators)
        template, name = region.instance.template, region.segment.hash
        regions.append(
            PlannedRegion(*span, name, names, template, config, us, None, True, "part of the initial scheme")
        )
    return BlockPlan(key, space.scheme(choice).text(), space.count, tuple(regions))
