"""The portable file lowered for TensorRT: plugin nodes, packed projections, 2-D tensors; no functions are left."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import inliner

from stof_onnx.attention.functions import DOMAIN
from stof_onnx.errors import StofError
from stof_onnx.files import move_together
from stof_onnx.fusion.functions import PREFIX as REGION
from stof_onnx.fusion.functions import is_region
from stof_onnx.graph.proto_graph import all_graphs, drop_dead
from stof_onnx.graph.proto_shapes import SymbolicShapes, infer_shapes
from stof_onnx.kernels.select import Device
from stof_onnx.trt.flatten import flatten
from stof_onnx.trt.fold_constants import fold_dense_masks, fold_position_tables
from stof_onnx.trt.pack_qkv import pack_qkv
from stof_onnx.trt.pack_rotated import may_rotate, pack_rotated
from stof_onnx.trt.plugin_nodes import SiteLowering, is_plugin, make_plugin_nodes
from stof_onnx.trt.region_nodes import (
    RegionLowering,
    RotatedRegions,
    inline_regions,
    make_region_nodes,
    settle_programs,
)
from stof_onnx.trt.whole_runs import mark_runs

EMITTED_DOMAIN = "trt.plugins"  # where ONNX Runtime's TensorRT provider looks for plugins
_TOO_LARGE = 1 << 30  # bytes above which weights go to a file of their own


@dataclass(frozen=True)
class LowerOptions:
    """What the lowered model is for.

    Attributes:
        precision: of the engine: "fp16", "bf16" or "fp32"; float32 attentions are run in it.
        device: what kernels are chosen for.
        opt_sizes, largest_sizes: concrete shapes of the graph inputs, to tune for and to bound.
        domain: of the plugin nodes.
        rank_2: merge projections and keep tensors 2-D between attentions.
        left: names of sites that stay ordinary operators, for TensorRT's own kernels.
        regions: fused regions become plugin nodes; else they are the operators they were made of.
        mark_runs: for TensorRT 8.6 (see `whole_runs`).
    """

    precision: str = "fp16"
    device: Device = field(default_factory=Device)
    opt_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    largest_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    domain: str = DOMAIN
    rank_2: bool = True
    left: frozenset[str] = frozenset()
    regions: bool = True
    mark_runs: bool = False


@dataclass
class Lowered:
    """The lowered model, what became of each attention, and how much was packed and flattened."""

    model: onnx.ModelProto
    sites: list[SiteLowering]
    regions: list[RegionLowering] = field(default_factory=list)
    packed: int = 0
    flattened: int = 0
    has_regions: bool = False  # the portable model has regions, or may have rotations; lowered or not

    @property
    def fused(self) -> int:
        return sum(1 for region in self.regions if region.template)

    @property
    def plugins(self) -> int:
        return sum(1 for site in self.sites if site.kernel)

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        sites = [asdict(site) for site in self.sites]
        regions = [asdict(region) for region in self.regions]
        return {"packed": self.packed, "flattened": self.flattened, "sites": sites, "regions": regions}


def lower_model(model: onnx.ModelProto, options: LowerOptions) -> Lowered:
    """Lowers a copy of the portable `model` (weights loaded).

    Raises:
        StofError: mask arrays that do not follow the format, or a kernel of a region that can not be compiled.
    """
    has_regions = any(is_region(node) for node in model.graph.node)
    if not options.regions:
        model = inline_regions(model)
    symbolic = SymbolicShapes(infer_shapes(model))
    opt = infer_shapes(model, options.opt_sizes).dims if options.opt_sizes else symbolic.dims
    largest = infer_shapes(model, options.largest_sizes).dims if options.largest_sizes else opt
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    o = options
    sites = make_plugin_nodes(lowered, opt, largest, o.precision, o.device, o.domain, o.left)
    regions, programs = make_region_nodes(lowered, symbolic, o.precision, o.device, o.domain)
    drop_dead(lowered.graph)
    result = Lowered(_without_functions(lowered), sites, regions, has_regions=has_regions)
    fold_position_tables(result.model)
    if options.rank_2 and result.plugins:
        rotated = RotatedRegions(symbolic, o.precision, o.device, o.domain)
        result.packed = pack_qkv(result.model, symbolic, programs.projections)
        result.has_regions |= may_rotate(result.model, rotated)
        if o.regions:
            turned = pack_rotated(result.model, symbolic, rotated)
            result.packed += len(turned)
            result.regions += turned
        result.flattened = flatten(result.model, symbolic.refreshed(result.model))
    settle_programs(result.model, programs, o.device)
    if options.mark_runs:
        mark_runs(result.model)
    drop_dead(result.model.graph)
    used = {n.domain for n in result.model.graph.node} | {"", options.domain}
    kept = [o for o in result.model.opset_import if o.domain in used or o.domain == "ai.onnx"]
    del result.model.opset_import[:]
    result.model.opset_import.extend(kept)
    return result


def lower_file(path: Path, options: LowerOptions) -> Lowered:
    """Lowers the portable file at `path`.

    Raises:
        StofError: the file can not be read, or its mask arrays do not follow the format.
    """
    try:
        model = onnx.load(str(path))
    except Exception as error:  # protobuf and the file system raise many types
        raise StofError(f"can not be read ({error})", str(path)) from error
    return lower_model(model, options)


def save_lowered(model: onnx.ModelProto, path: Path) -> None:
    """Writes a lowered model, its weights beside it where one protobuf would be too large; all of it or nothing.

    Raises:
        StofError: the file can not be written.
    """
    name = f"{path.name}.data" if model.ByteSize() > _TOO_LARGE else None
    try:
        with tempfile.TemporaryDirectory(prefix=".stof-", dir=path.parent) as folder:
            onnx.save(model, str(Path(folder, path.name)), save_as_external_data=name is not None, location=name)
            written = [file for file in (name, path.name) if file]  # the model last: it is nothing without its weights
            move_together({Path(folder, file): path.with_name(file) for file in written}, path.parent)
    except OSError as error:
        raise StofError(f"can not be written ({error.strerror})", str(path), "Choose another place") from error


def _without_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its functions inlined, and the masks of what was a stof function dense: TensorRT knows neither."""
    called = {(n.domain, n.op_type) for graph in all_graphs(model.graph) for n in graph.node}
    if not any((f.domain, f.name) in called for f in model.functions):
        del model.functions[:]
        return model
    arrays = {i.name for i in model.graph.initializer}
    nodes = [n for g in all_graphs(model.graph) for n in g.node if n.domain == DOMAIN]
    calls = [n for n in nodes if not is_plugin(n) and not n.op_type.startswith(REGION)]
    read = {name for node in calls for name in node.input}
    inlined = inliner.inline_local_functions(model)
    fold_dense_masks(inlined, arrays & read)
    return inlined
