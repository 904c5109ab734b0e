"""`stof::StofAttention_<variant>` function nodes become `StofAttention` plugin nodes.

The arrays of the mask are validated, brought into the chosen kernel's form once for all nodes that share them, and the
inputs that only the function body reads (`mask`, `row_ok`) are dropped. What the plugin can not run stays a function
call, which TensorRT gets inlined as ordinary operators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from stof_onnx.attention.functions import DOMAIN
from stof_onnx.attention.functions.attention import DTYPE_NAMES, PREFIX
from stof_onnx.attention.types import BiasKind, KvKind, MaskedRow
from stof_onnx.graph.proto_graph import ProtoGraph, all_graphs, attributes_of
from stof_onnx.kernels.select import Device, KernelSite, LoweredSite, lower_site
from stof_onnx.mask import ONNX_INPUTS, EncodedMask, encode_bands
from stof_onnx.mask.sources import all_keys

PLUGIN = "StofAttention"
PLUGIN_VERSION, PLUGIN_NAMESPACE = "1", "stof"
_NAMED = re.compile(r"softcap|[a-z]+bias|kv[a-z]+|h\d+(kv\d+)?")  # parts of a function's name that attributes repeat
_DTYPES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
_PLUGIN_ATTRIBUTES = (
    "scale",
    "softcap",
    "num_heads",
    "num_kv_heads",
    "layout",
    "bias_kind",
    "rel_rq",
    "kv_kind",
    "masked_row",
)

Shapes = Mapping[str, tuple[int | str | None, ...]]


@dataclass
class SiteLowering:
    """What became of one attention: `kernel` is empty where it stays ordinary operators, and `reason` says why.

    `dense_flops`: of QK and PV over all keys, at the sizes to tune for. `predicted_us`: what the cost model says of the
    kernel at these sizes, with the coefficients of `profile`.
    """

    name: str
    kernel: str = ""
    reason: str = ""
    layout: str = ""
    mask_bytes: int = 0
    dense_mask_bytes: int = 0
    tiles: tuple[int, int] = (0, 0)
    dense_flops: int = 0
    predicted_us: float = 0.0
    profile: str = ""


@dataclass
class _Shared:
    """Lowered arrays already in the graph: content to initializer names."""

    names: dict[tuple[object, ...], tuple[LoweredSite, list[str]]] = field(default_factory=dict)
    masks: dict[tuple[object, ...], EncodedMask] = field(default_factory=dict)


def make_plugin_nodes(
    model: onnx.ModelProto,
    opt: Shapes,
    largest: Shapes,
    precision: str,
    device: Device,
    domain: str = DOMAIN,
    left: frozenset[str] = frozenset(),
) -> list[SiteLowering]:
    """Replaces the function nodes of `model` (at any depth) in place; function definitions stay for those left.

    Args:
        model: the portable model, its weights loaded.
        opt, largest: concrete shapes of tensors at the sizes to tune for and at the largest ones.
        precision: "fp16" or "bf16": what float32 tensors become in the engine; "fp32": they stay.
        device: what kernels are chosen for.
        domain: of the plugin nodes: TensorRT's parser takes any, ONNX Runtime's provider wants "trt.plugins".
        left: names of sites that stay function calls.

    Raises:
        StofError: mask arrays that do not follow the format.
    """
    root, shared, sites = ProtoGraph(model.graph), _Shared(), []
    for graph in all_graphs(model.graph):
        for node in graph.node:
            if node.domain == DOMAIN and node.op_type.startswith(PREFIX + "_"):
                site = _Site(root, node, shared, precision, device)
                sites.append(site.leave() if site.name in left else site.lower(opt, largest, domain))
    if any(site.kernel for site in sites) and domain not in {o.domain for o in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return sites


def is_plugin(node: onnx.NodeProto) -> bool:
    """Whether `node` is a lowered attention."""
    return node.op_type == PLUGIN and any(a.name == "plugin_version" for a in node.attribute)


class _Site:
    def __init__(self, root: ProtoGraph, node: onnx.NodeProto, shared: _Shared, precision: str, device: Device) -> None:
        self.root, self.node, self.shared, self.device = root, node, shared, device
        self.attributes = attributes_of(node)
        kinds = {name for name in DTYPE_NAMES.values() if name in node.op_type.split("_")}
        self.model_dtype = _DTYPES.get(kinds.pop() if len(kinds) == 1 else "", "")
        self.dtype = precision if self.model_dtype == "fp32" else self.model_dtype

    @property
    def name(self) -> str:
        return self.node.name or self.node.output[0]

    def leave(self) -> SiteLowering:
        return SiteLowering(self.name, reason="left to TensorRT, which should be faster here")

    def lower(self, opt: Shapes, largest: Shapes, domain: str) -> SiteLowering:
        result = SiteLowering(self.name)
        if not self._agrees():
            result.reason = "its attributes are not those of its function: someone has edited them"
            return result
        arrays = self._arrays()
        sizes, most = self._sizes(opt), self._sizes(largest)
        result.reason = self._problem(arrays, sizes, most)
        if result.reason:
            return result
        assert arrays is not None and sizes is not None and most is not None
        site = self._kernel_site(sizes)
        lowered, names = self._lower_mask(arrays, site, most)
        bias, reason = self._bias()
        if reason:
            result.reason = reason
            return result
        kv = [self.node.input[self._kv_input()]] if site.kv is not KvKind.NONE else []
        inputs = [*self.node.input[:3], *names, *bias, *kv]
        kept = {name: self.attributes[name] for name in _PLUGIN_ATTRIBUTES if name in self.attributes}
        kept |= lowered.attributes | {"head_dim": sizes.head_dim, "v_head_dim": sizes.v_head_dim}
        del self.node.input[:], self.node.attribute[:]
        self.node.input.extend(inputs)
        self.node.op_type, self.node.domain = PLUGIN, domain
        kept |= {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
        self.node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in sorted(kept.items()))
        choice = lowered.choice
        result.kernel, result.reason = choice.config.kernel, choice.reason
        result.predicted_us, result.profile = round(choice.predicted_us, 2), choice.profile
        result.layout = str(self.attributes["layout"])
        result.tiles = (choice.config.tile_m, choice.config.tile_n)
        result.dense_flops = (
            2 * sizes.batch * site.heads * sizes.seq_q * sizes.seq_kv * (sizes.head_dim + sizes.v_head_dim)
        )
        result.mask_bytes = sum(a.nbytes for a in lowered.arrays.values())
        result.dense_mask_bytes = most.seq_q * most.seq_kv * (4 if self.model_dtype == "fp32" else 2)
        return result

    def _arrays(self) -> dict[str, np.ndarray] | None:
        found = {name: self.root.constant(self.node.input[3 + i]) for i, name in enumerate(ONNX_INPUTS)}
        arrays = {name: array for name, array in found.items() if array is not None}
        return arrays if len(arrays) == len(ONNX_INPUTS) else None

    def _sizes(self, shapes: Shapes) -> _Sizes | None:
        layouts = str(self.attributes["layout"]).split(",")
        q, k, v, _ = layouts * 4 if len(layouts) == 1 else layouts
        heads, kv_heads = self._int("num_heads"), self._int("num_kv_heads")
        read = [
            _bshd(shapes.get(name), layout, count)
            for name, layout, count in zip(self.node.input[:3], (q, k, v), (heads, kv_heads, kv_heads), strict=True)
        ]
        if any(r is None for r in read):
            return None
        (batch, seq_q, dim), (_, seq_kv, _), (_, _, v_dim) = [r for r in read if r is not None]
        return _Sizes(batch, seq_q, seq_kv, dim, v_dim)

    def _problem(self, arrays: dict[str, np.ndarray] | None, sizes: _Sizes | None, most: _Sizes | None) -> str:
        if not self.dtype:
            return "no kernel for its dtype"
        if arrays is None:
            return "its mask arrays are not constants of the main graph"
        if sizes is None or most is None:
            return "the shapes of Q, K and V are not known"
        for dim in (sizes.head_dim, sizes.v_head_dim):
            if dim % 8 or dim > 256:
                return f"no kernel for head size {dim} (multiples of 8 up to 256)"
        return ""

    def _agrees(self) -> bool:
        """Whether the attributes, which the plugin follows, say what the function's name says of its body."""
        heads, kv_heads = self._int("num_heads"), self._int("num_kv_heads")
        if kv_heads < 1 or heads % kv_heads or self.attributes["masked_row"] not in [row.value for row in MaskedRow]:
            return False
        bias, kv = self.attributes["bias_kind"], self.attributes["kv_kind"]
        told = {"softcap"} if self.attributes.get("softcap", 0.0) != 0.0 else set()
        told |= ({f"{bias}bias"} if bias != "none" else set()) | ({f"kv{kv}"} if kv != "none" else set())
        told |= {f"h{heads}kv{kv_heads}"} if heads != kv_heads else set()
        found = set(filter(_NAMED.fullmatch, self.node.op_type.split("_")))
        return found - {f"h{heads}"} == told

    def _kernel_site(self, sizes: _Sizes) -> KernelSite:
        return KernelSite(
            batch=sizes.batch,
            heads=self._int("num_heads"),
            head_dim=sizes.head_dim,
            v_head_dim=sizes.v_head_dim,
            dtype=self.dtype,
            scale=float(self.attributes["scale"]),  # type: ignore[arg-type]
            softcap=float(self.attributes.get("softcap", 0.0)),  # type: ignore[arg-type]
            bias=BiasKind(self.attributes["bias_kind"]),
            kv=KvKind(self.attributes["kv_kind"]),
            masked_row=MaskedRow(self.attributes["masked_row"]),
        )

    def _lower_mask(
        self, arrays: dict[str, np.ndarray], site: KernelSite, most: _Sizes
    ) -> tuple[LoweredSite, list[str]]:
        seq_q, seq_kv = self._int("mask_seq_q"), self._int("mask_seq_kv")
        key = (tuple(self.node.input[3:10]), seq_q or most.seq_q, seq_kv or most.seq_kv)
        if key not in self.shared.masks:
            if seq_q == 0:  # nothing bounds the sequence and every key is allowed: bounded by the profile here
                mask = encode_bands(all_keys(most.seq_q, most.seq_kv), most.seq_q, most.seq_kv)
            else:
                tiles = self._int("tile_m"), self._int("tile_n")
                mask = EncodedMask.from_onnx_arrays(arrays, seq_q, seq_kv, *tiles, where=self.node.name)
            self.shared.masks[key] = mask
        full_key = (*key, site)
        if full_key not in self.shared.names:
            lowered = lower_site(self.shared.masks[key], site, self.device, self.node.name)
            self.shared.names[full_key] = lowered, [self._share(n, lowered.arrays[n]) for n in ONNX_INPUTS]
        return self.shared.names[full_key]

    def _share(self, name: str, array: np.ndarray) -> str:
        """The initializer of a lowered array; equal ones are stored once."""
        key = ("array", name, array.shape, array.tobytes())
        if key not in self.shared.masks:
            self.shared.masks[key] = self.root.add_constant(f"stof/lowered/{name}", array)  # type: ignore[assignment]
        return self.shared.masks[key]  # type: ignore[return-value]

    def _bias(self) -> tuple[list[str], str]:
        """The bias input in the dtype of Q, or why it can not be."""
        if BiasKind(self.attributes["bias_kind"]) is BiasKind.NONE:
            return [], ""
        name = self.node.input[3 + len(ONNX_INPUTS)]
        value = self.root.constant(name)
        dense = BiasKind(self.attributes["bias_kind"]) is BiasKind.DENSE
        if dense and MaskedRow(self.attributes["masked_row"]) is MaskedRow.SCORES:
            return [], "rows that mask and padding empty yield the scores, which a dense bias may hide as well"
        if value is None:
            return [name], ""
        if self.dtype == "bf16" or self.model_dtype == "bf16":
            return [], "a bias in bf16 is not lowered"
        wanted = {"fp16": np.float16, "fp32": np.float32}.get(self.dtype)
        if wanted is np.float16:
            finite = value[np.isfinite(value)]
            if finite.size and np.abs(finite).max() > np.finfo(np.float16).max:
                return [], "its bias holds finite values beyond the range of fp16"
        stored = {"fp16": np.float16, "fp32": np.float32}.get(self.model_dtype)
        if stored is not None and value.dtype != stored:
            return [self._share("bias", value.astype(stored))], ""
        return [name], ""

    def _kv_input(self) -> int:
        return 3 + len(ONNX_INPUTS) + (BiasKind(self.attributes["bias_kind"]) is not BiasKind.NONE)

    def _int(self, name: str) -> int:
        return int(self.attributes[name])  # type: ignore[call-overload]


@dataclass(frozen=True)
class _Sizes:
    batch: int
    seq_q: int
    seq_kv: int
    head_dim: int
    v_head_dim: int


def _bshd(shape: tuple[int | str | None, ...] | None, layout: str, heads: int) -> tuple[int, int, int] | None:
    """(batch, sequence, head size) of one tensor, None where its shape is not known."""
    if shape is None or not all(isinstance(d, int) for d in shape):
        return None
    sizes = [d for d in shape if isinstance(d, int)]
    if len(sizes) == 3:
        return sizes[0], sizes[1], sizes[2] // heads
    return (sizes[0], sizes[2], sizes[3]) if layout == "BHSD" else (sizes[0], sizes[1], sizes[3])
