"""`stof::StofFusedRegion_<hash>` function nodes become `StofFusedRegion` plugin nodes (docs/architecture.md).

In two steps, since compiled programs are for tensors of one rank: `make_region_nodes` before lowering settles which
tensors are 2-D, `settle_programs` after it. What can not run stays a function call, which TensorRT gets inlined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, inliner

from stof_onnx.errors import StofError
from stof_onnx.fusion.functions import NORM_ATTRIBUTES, PREFIX, is_region
from stof_onnx.fusion.pairs import pair_of
from stof_onnx.fusion.row_programs import row_program
from stof_onnx.fusion.templates import GEMM_TEMPLATES
from stof_onnx.fusion.tensors import FLOATS
from stof_onnx.graph.proto_graph import ProtoGraph, attributes_of
from stof_onnx.graph.proto_shapes import SymbolicShapes
from stof_onnx.kernels import gemm
from stof_onnx.kernels.select import Device
from stof_onnx.kernels.triton_rows import Config, Program, compile_programs, parse_config

PLUGIN_VERSION, PLUGIN_NAMESPACE = "1", "stof"
RANK = "rank"  # of a plugin node between the two steps
_LEAST_ARCH, _GEMM_ARCH, _GEMM_DTYPES = 80, 90, ("fp16", "bf16")
_WEIGHTS = {"gemm_epilogue": 1, "gated_mlp": 2, "gemm_norm": 1, "gemm_pair": 2}
Compile = Callable[[Sequence[tuple[Program, Config, int]], int], list[str]]


@dataclass
class RegionLowering:
    """What became of one region: `template` (of the plugin node, see docs/architecture.md) is empty where it stays
    ordinary operators, and `reason` says why."""

    name: str
    template: str = ""
    config: str = ""
    reason: str = ""


@dataclass
class Pending:
    """What waits for later steps of lowering, by node name.

    Attributes:
        programs: for the rank of their tensors.
        projections: of an attention, for being packed: the configuration, the engine's type, and the region's report.
    """

    programs: dict[str, tuple[Program, Config]] = field(default_factory=dict)
    projections: dict[str, PackedRegion] = field(default_factory=dict)


@dataclass
class PackedRegion:
    """Packed projections as one GEMM region: its configuration, the engine's type, the node's domain, and what the
    report says."""

    config: str
    dtype: str
    domain: str
    lowering: RegionLowering


@dataclass(frozen=True)
class RotatedRegions:
    """Regions for packed projections behind rotary embeddings, which no plan names: the library picks the variant.

    Attributes:
        shapes: of the portable model.
        precision, device, domain: as for `make_region_nodes`.
    """

    shapes: SymbolicShapes
    precision: str
    device: Device
    domain: str

    def region(self, name: str, x: str) -> PackedRegion | None:
        """For the attention `name` of the model's tensor `x`; None where no kernel computes it."""
        stored = FLOATS.get(self.shapes.types.get(x, 0), "")
        dtype = self.precision if stored == "fp32" else stored
        if self.device.arch != _GEMM_ARCH or dtype not in _GEMM_DTYPES:
            return None
        return PackedRegion(gemm.AUTO, dtype, self.domain, RegionLowering(f"{name}/qkv", config=gemm.AUTO))


def is_region_plugin(node: onnx.NodeProto) -> bool:
    """Whether `node` is a lowered region."""
    return node.op_type == PREFIX and any(a.name == "plugin_version" for a in node.attribute)


def set_rank(node: onnx.NodeProto, rank: int) -> None:
    """Notes the rank that the tensors of a lowered region have now."""
    for a in node.attribute:
        if a.name == RANK:
            a.i = rank


def inline_regions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its regions as the operators they were made of."""
    names = [(f.domain, f.name) for f in model.functions if f.name.startswith(PREFIX + "_")]
    return inliner.inline_selected_functions(model, names) if names else model


def make_region_nodes(
    model: onnx.ModelProto, shapes: SymbolicShapes, precision: str, device: Device, domain: str
) -> tuple[list[RegionLowering], Pending]:
    """Replaces the function nodes of the main graph in place; function definitions stay for those left.

    Args:
        model: the portable model, its weights loaded.
        shapes: of the portable model.
        precision: "fp16" or "bf16": what float32 tensors become in the engine; "fp32": they stay.
        device: what kernels are for.
        domain: of the plugin nodes.
    """
    graph, pending = ProtoGraph(model.graph), Pending()
    functions = {f.name: f for f in model.functions}
    found = []
    for node in model.graph.node:
        if is_region(node):
            region = _Region(graph, node, shapes, precision, device)
            found.append(region.lower(functions[node.op_type], domain, pending))
    if any(region.template for region in found) and domain not in {o.domain for o in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    return found, pending


def settle_programs(
    model: onnx.ModelProto, pending: Pending, device: Device, compile_all: Compile | None = None
) -> None:
    """Puts the compiled programs into their nodes, for the rank that their tensors have now.

    Raises:
        StofError: a kernel is not compiled and can not be.
    """
    waiting = []
    for node in model.graph.node:
        if not is_region_plugin(node):
            continue
        rank = int(attributes_of(node)[RANK])  # type: ignore[call-overload]
        kept = [a for a in node.attribute if a.name != RANK]
        del node.attribute[:]
        node.attribute.extend(kept)
        if node.name in pending.programs:
            waiting.append((node, (*pending.programs[node.name], rank)))
    if waiting:
        texts = (compile_all or _compile)([item for _, item in waiting], device.arch)
        for (node, _), text in zip(waiting, texts, strict=True):
            node.attribute.append(helper.make_attribute("program", text))


def _compile(items: Sequence[tuple[Program, Config, int]], arch: int) -> list[str]:
    return [program.base64() for program in compile_programs(items, (arch,))]


def narrowed(value: np.ndarray, dtype: str) -> np.ndarray | None:
    """Weights in the engine's type; None where they do not fit it, or numpy has not got it (bfloat16)."""
    if dtype == "bf16":
        return None if value.dtype == np.float32 else value
    if dtype != "fp16" or value.dtype != np.float32:
        return value
    with np.errstate(over="ignore"):  # what does not fit is looked for below
        narrow = value.astype(np.float16)
    return narrow if np.array_equal(np.isfinite(narrow), np.isfinite(value)) else None


def gemm_region(
    inputs: Sequence[str], output: str, config: str, domain: str, has_bias: bool, rotated: tuple[int, int] = (0, 0)
) -> onnx.NodeProto:
    """A lowered region of 2-D tensors: x w (+ bias), of which `rotated` columns, in heads of so many, are rotated."""
    node = helper.make_node(PREFIX, list(inputs), [output], output, domain=domain)
    values: dict[str, object] = {"template": "gemm_epilogue", "config": config, RANK: 2}
    values |= {"activation": "none", "has_bias": int(has_bias), "has_residual": 0}
    if rotated[0]:
        values |= {"rotated_columns": rotated[0], "head_dim": rotated[1]}
    values |= {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in sorted(values.items()))
    return node


class _Region:
    def __init__(
        self, graph: ProtoGraph, node: onnx.NodeProto, shapes: SymbolicShapes, precision: str, device: Device
    ) -> None:
        self.graph, self.node, self.shapes, self.device = graph, node, shapes, device
        self.attributes = attributes_of(node)
        self.template = str(self.attributes["template"])
        self.model_dtype = FLOATS.get(shapes.types.get(node.input[0], 0), "")
        self.dtype = precision if self.model_dtype == "fp32" else self.model_dtype

    def lower(self, function: onnx.FunctionProto, domain: str, pending: Pending) -> RegionLowering:
        result = RegionLowering(self.node.name, config=str(self.attributes["config"]))
        result.reason = self._problem()
        if result.reason:
            return result
        if self.template == "projections":
            self._leave_to_packing(result, domain, pending)
            return result
        constants = self._constants()
        if isinstance(constants, str):
            result.reason = constants
            return result
        rank = self.shapes.rank(self.node.input[0])
        if self.template in GEMM_TEMPLATES:
            result.template = self.template
            own = NORM_ATTRIBUTES if self.template == "gemm_norm" else ("activation", "has_bias", "has_residual")
            names = (*own, "config")
            kept = {name: self.attributes[name] for name in names if name in self.attributes}
        else:
            result.template, kept = "cubin", {}
            try:
                program = self._program(function)
                config = parse_config(program, result.config)
                _compile([(program, config, 2)], self.device.arch)  # another rank takes the same kernel, from the cache
            except StofError as error:
                result.template, result.reason = "", str(error)
                return result
            pending.programs[self.node.name] = program, config
        kept |= {"template": result.template, RANK: rank}
        kept |= {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
        for place, name in constants.items():
            self.node.input[place] = name
        del self.node.attribute[:]
        self.node.attribute.extend(helper.make_attribute(name, value) for name, value in sorted(kept.items()))
        self.node.op_type, self.node.domain = PREFIX, domain
        return result

    def _leave_to_packing(self, result: RegionLowering, domain: str, pending: Pending) -> None:
        """The node stays a function call, whose operators packing finds."""
        readers = [n for n in self.graph.graph.node if list(n.input[:3]) == list(self.node.output)]
        result.reason = "its attention takes Q, K and V apart"
        if len(readers) == 1:
            pending.projections[readers[0].name] = PackedRegion(result.config, self.dtype, domain, result)

    def _problem(self) -> str:
        if not self.dtype:
            return "the type of its input is not known"
        if self.shapes.rank(self.node.input[0]) not in (2, 3):
            return "the rank of its input is not known"
        if self.template not in GEMM_TEMPLATES:
            return ""
        config = str(self.attributes["config"])
        if config == gemm.CUBLASLT and self.template in ("gemm_epilogue", "projections"):
            return self._cublaslt_problem()
        if self.device.arch != _GEMM_ARCH:
            return f"its template needs compute capability 9.0, not {self.device.arch / 10:.1f}"
        if self.dtype not in _GEMM_DTYPES:
            return "its template computes in fp16 and bf16 only"
        known = gemm.configs("gemm_epilogue" if self.template == "projections" else self.template)
        if config not in (gemm.AUTO, *known):
            return f"its configuration '{config}' is none of {', '.join((gemm.AUTO, *known))}: make the plan again"
        return ""

    def _cublaslt_problem(self) -> str:
        if self.device.arch < _LEAST_ARCH:
            return f"its template needs compute capability 8.0, not {self.device.arch / 10:.1f}"
        if self.dtype not in _GEMM_DTYPES:
            return "its template computes in fp16 and bf16 only"
        activation = str(self.attributes.get("activation", "none"))
        return gemm.cublaslt_lacks(activation, bool(self.attributes.get("has_residual", 0)))

    def _constants(self) -> dict[int, str] | str:
        """Weights and vectors as the kernel reads them, by place; or what is in the way."""
        found: dict[int, str] = {}
        transposed, vectors = (int(self.attributes.get(name, 0)) for name in ("transposed", "vectors"))  # type: ignore[call-overload]
        weights = _WEIGHTS.get(self.template, 0)
        for place, name in enumerate(self.node.input):
            weight = 1 <= place <= weights
            bias = self.template in GEMM_TEMPLATES and place > weights and self._is_bias(place, weights)
            if not weight and not bias and not vectors >> place & 1:
                continue
            value = self.graph.constant(name)
            if value is None:
                return f"its input '{name}' is not a constant of the main graph"
            turned = bool(weight and transposed >> (place - 1) & 1)
            made = self._constant(name, value, turned, flat=not weight)
            if not made:
                return f"its constant '{name}' does not fit {self.dtype}"
            found[place] = made
        return found

    def _is_bias(self, place: int, weights: int) -> bool:
        biases = weights if self.attributes["has_bias"] else 0
        return place <= weights + biases

    def _constant(self, name: str, value: np.ndarray, turned: bool, flat: bool) -> str:
        """The name of the initializer in the engine's type; empty where its values do not fit."""
        made = f"{name}/stof_{self.dtype}{'_turned' if turned else ''}"
        if made in self.graph.initializers:
            return made
        stored = narrowed(value, self.dtype)
        if stored is None:
            return ""
        stored = stored.T if turned else stored
        return self.graph.add_constant(made, stored.reshape(-1) if flat else stored)

    def _program(self, function: onnx.FunctionProto) -> Program:
        width = self.shapes.dim(self.node.input[0], -1)
        if not isinstance(width, int):
            raise StofError("the last axis of its input is not known", self.node.name)
        if self.template == "gemm_pair":
            out = self.shapes.dim(self.node.output[0], -1)
            if not isinstance(out, int):
                raise StofError("the last axis of its output is not known", self.node.name)
            return pair_of(self.attributes, width, out, self.dtype)
        vectors = int(self.attributes["vectors"])  # type: ignore[call-overload]
        inputs = list(function.input)
        named = [name for place, name in enumerate(inputs) if vectors >> place & 1]
        return row_program(function.node, inputs, named, list(function.output), width, self.dtype)
