"""Replaces each matched attention by one `stof::StofAttention_<variant>` call (docs/architecture.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from stof_onnx.attention.axis_names import axis_names
from stof_onnx.attention.contract import ContractSite
from stof_onnx.attention.functions import (
    DOMAIN,
    attention_function,
    mask_function,
)
from stof_onnx.attention.sweep import all_graphs, sweep_dead
from stof_onnx.attention.types import AttentionMatch, BiasKind, BiasTerm, KvKind, KvMask, Layout
from stof_onnx.errors import StofError
from stof_onnx.graph.shapes import elem_type, np_dtype
from stof_onnx.mask import ONNX_INPUTS

if TYPE_CHECKING:
    from stof_onnx.graph.model import LoadedModel


@dataclass(frozen=True)
class ReplacedSite:
    """One replacement that was made.

    Attributes:
        match: what was replaced.
        node: the new node, in `match.graph`.
        function: name of the function it calls.
        mask_function: name of the function that makes its dense mask; empty when the body needs none.
        removed: names of the nodes that were removed with it.
    """

    match: AttentionMatch
    node: gs.Node
    function: str
    mask_function: str
    removed: tuple[str, ...]


def replace_attention(model: LoadedModel, matches: Sequence[AttentionMatch]) -> list[ReplacedSite]:
    """Edits `model.graph` and adds the functions that the new nodes call; one result a match, in their order.

    Only nodes that a replacement leaves without a reader go. Equal matches give equal names, nodes and bytes.

    Raises:
        StofError: a match that the node contract can not express (a matcher's mistake), or a function name that the
            model already uses for something else.
    """
    rewriter = _Rewriter(model)
    order = sorted(range(len(matches)), key=lambda i: rewriter.position(matches[i]))
    sites = {i: rewriter.replace(matches[i]) for i in order}
    return [sites[i] for i in range(len(matches))]


class _Rewriter:
    """The state of one run: what is shared between sites, and which names are taken."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        roots = [model.graph, *model.graph.functions]
        self._root = {id(graph): root for root in roots for graph in all_graphs(root)}
        self._places = {
            id(node): (number, index)
            for number, graph in enumerate(g for root in roots for g in all_graphs(root))
            for index, node in enumerate(graph.nodes)
        }
        self._tensors: dict[int, dict[str, gs.Tensor]] = {}
        self._node_names = {node.name for root in roots for graph in all_graphs(root) for node in graph.nodes}
        self._made: dict[tuple[object, ...], tuple[gs.Tensor, ...]] = {}
        self._heads: dict[int, int] = {}  # mask calls at the head of each root graph

    def position(self, match: AttentionMatch) -> tuple[int, int]:
        """Where the output of the site is produced: graph, then index in it."""
        return self._places[id(match.output.inputs[0])]

    def replace(self, match: AttentionMatch) -> ReplacedSite:
        root = self._root[id(match.graph)]
        site = ContractSite(match)
        producer = match.output.inputs[0]
        arrays = {name: self._constant(root, name, array) for name, array in site.arrays().items()}
        new = self._prelude(root, match)
        bias = self._bias(root, match, new)
        kv_mask = self._kv_mask(match.graph, match.kv_mask, new)
        shared = self._mask(root, site, arrays, bias, kv_mask, new)
        variant = site.attention_variant()
        optional = [tensor for tensor in (bias, kv_mask) if tensor is not None]
        node = gs.Node(
            op=variant.name,
            name=self._node_name(f"{match.name}/StofAttention"),
            attrs=site.attributes(),
            inputs=[match.q, match.k, match.v, *(arrays[name] for name in ONNX_INPUTS), *optional, *shared],
            domain=DOMAIN,
        )
        new.append(node)
        index = _index(match.graph.nodes, producer)
        match.output.inputs.clear()
        if match.o_layout is Layout.BSHD and match.output_rank == 2:
            new.append(self._flattened(root, match, node))
        else:
            node.outputs.append(match.output)
        match.graph.nodes[index:index] = new
        self.model.add_function(attention_function(variant, self.model.opset))
        removed = sweep_dead(root, [producer, *match.nodes])
        mask_variant = site.mask_variant()
        names = tuple(gone.name for gone in removed)
        return ReplacedSite(match, node, variant.name, mask_variant.name if mask_variant else "", names)

    def _flattened(self, root: gs.Graph, match: AttentionMatch, node: gs.Node) -> gs.Node:
        """The Reshape from the node's [B, Sq, H*Dv] to an output of rank 2."""
        wide = gs.Variable(self._tensor_name(root, f"{match.output.name}/stof_rank_3"), dtype=match.output.dtype)
        node.outputs.append(wide)
        shape = self._constant(root, "shape", np.array([-1, match.num_heads * match.v_head_dim], np.int64))
        name = self._node_name(f"{match.name}/stof_flatten")
        return gs.Node(op="Reshape", name=name, inputs=[wide, shape], outputs=[match.output])

    def _prelude(self, root: gs.Graph, match: AttentionMatch) -> list[gs.Node]:
        """The nodes that make what the graph does not hold yet, with names that are free."""
        nodes = []
        for step in match.prelude:
            inputs = [
                self._constant(root, tensor.name, tensor.values)
                if isinstance(tensor, gs.Constant) and self._names(root).get(tensor.name) is not tensor
                else tensor
                for tensor in step.inputs
            ]
            for tensor in step.outputs:
                tensor.name = self._tensor_name(root, tensor.name)
                self._names(root)[tensor.name] = tensor
            name = self._node_name(f"{step.outputs[0].name}/{step.op}")
            nodes.append(gs.Node(step.op, name, dict(step.attrs), inputs, list(step.outputs)))
        return nodes

    def _mask(
        self,
        root: gs.Graph,
        site: ContractSite,
        arrays: dict[str, gs.Tensor],
        bias: gs.Tensor | None,
        kv_mask: gs.Tensor | None,
        new: list[gs.Node],
    ) -> tuple[gs.Tensor, ...]:
        """The outputs of the mask function for this site: called once for all sites of a graph that share them."""
        variant = site.mask_variant()
        if variant is None:
            return ()
        match = site.match
        by_name = {**arrays, "bias": bias, "kv_mask": kv_mask, "Q": match.q, "K": match.k}
        inputs = [by_name[name] for name in variant.inputs]
        constant = all(isinstance(tensor, gs.Constant) for tensor in inputs)
        home = root if constant else match.graph
        key = ("mask", id(home), variant.name, *(self._identity(home, name, by_name[name]) for name in variant.inputs))
        if key not in self._made:
            self.model.add_function(mask_function(variant, self.model.opset))
            base = f"stof/{variant.name}"
            outputs = tuple(gs.Variable(self._tensor_name(root, f"{base}/{name}")) for name in variant.outputs)
            node = gs.Node(
                op=variant.name,
                name=self._node_name(base),
                inputs=inputs,
                outputs=list(outputs),
                domain=DOMAIN,
            )
            for tensor in outputs:
                self._tensors[id(root)][tensor.name] = tensor
            if constant:
                # Ahead of everything, so that sites in subgraphs see it too.
                head = self._heads.get(id(root), 0)
                root.nodes.insert(head, node)
                self._heads[id(root)] = head + 1
            else:
                new.append(node)
            self._made[key] = outputs
        return self._made[key]

    def _identity(self, home: gs.Graph, name: str, tensor: gs.Tensor) -> object:
        """What makes two inputs of a mask function equal: Q and K serve only for their sizes."""
        if name not in ("Q", "K") or home is not self.model.graph:
            return id(tensor)
        axes: Sequence[int | str | None] | None = tensor.shape
        if axes is None or not all(isinstance(axis, (int, str)) for axis in axes):
            axes = self._axis_names.get(tensor.name)
        return id(tensor) if axes is None else ("axes", tuple(axes))

    @cached_property
    def _axis_names(self) -> dict[str, tuple[int | str, ...]]:
        return axis_names(self.model.proto)

    def _bias(self, root: gs.Graph, match: AttentionMatch, new: list[gs.Node]) -> gs.Tensor | None:
        if match.bias.kind is BiasKind.NONE:
            return None
        if match.bias.array is not None:
            return self._constant(root, "bias", _bias_array(match.bias, match.dtype))
        tensor = match.bias.tensor
        if tensor is None:
            raise StofError("a bias has neither values nor a tensor", match.name, "Report this as a bug")
        if match.bias.kind is BiasKind.RELATIVE:
            return tensor
        key = ("bias", id(match.graph), id(tensor), str(match.dtype), match.seq_kv)
        if key not in self._made:
            self._made[key] = (self._dense_bias(root, match, tensor, new),)
        return self._made[key][0]

    def _dense_bias(self, root: gs.Graph, match: AttentionMatch, source: gs.Tensor, new: list[gs.Node]) -> gs.Tensor:
        """A run-time bias as [.., .., Sq, Skv] numbers: bool becomes 0 and -inf, missing keys are hidden."""
        known_shape = match.bias.shape if source.shape is None else source.shape
        known_dtype = match.bias.dtype if source.dtype is None else source.dtype
        if known_shape is None or known_dtype is None:
            raise StofError(f"the bias '{source.name}' has no known shape and type", match.name, "Report this as a bug")
        base, shape, dtype = f"{source.name}/stof_bias", list(known_shape), np.dtype(match.dtype)
        tensor = source
        bias_dtype = np_dtype(elem_type(known_dtype))
        if bias_dtype == np.bool_:
            zero = self._constant(root, "attend", np.zeros((), dtype))
            hidden = self._constant(root, "hide", np.full((), -np.inf, dtype))
            tensor = self._step(root, new, "Where", [tensor, zero, hidden], f"{base}_where")
        else:
            dtype = bias_dtype
        if len(shape) < 4:
            axes = self._constant(root, "axes", np.arange(4 - len(shape), dtype=np.int64))
            tensor = self._step(root, new, "Unsqueeze", [tensor, axes], f"{base}_4d")
        keys = shape[-1]
        if isinstance(keys, int) and 1 < keys < match.seq_kv:
            missing = self._constant(root, "pads", np.array([0] * 7 + [match.seq_kv - keys], np.int64))
            hidden = self._constant(root, "hide", np.full((), -np.inf, dtype))
            tensor = self._step(root, new, "Pad", [tensor, missing, hidden], f"{base}_padded", mode="constant")
        return tensor

    def _step(
        self, root: gs.Graph, new: list[gs.Node], op: str, inputs: list[gs.Tensor], name: str, **attrs: object
    ) -> gs.Variable:
        """Adds one standard operator ahead of the node that is being inserted."""
        output = gs.Variable(self._tensor_name(root, name))
        self._names(root)[output.name] = output
        new.append(gs.Node(op, self._node_name(f"{output.name}/{op}"), attrs, inputs, [output]))
        return output

    def _kv_mask(self, graph: gs.Graph, kv: KvMask, new: list[gs.Node]) -> gs.Tensor | None:
        """int32, 1 = attend: made once a graph for each tensor it comes from."""
        if kv.kind is KvKind.NONE:
            return None
        if kv.tensor is None:
            raise StofError("run-time padding has no tensor", "attention", "Report this as a bug")
        key = ("kv", id(graph), id(kv.tensor), kv.kind, kv.invert)
        if key not in self._made:
            self._made[key] = (self._normalised(graph, kv.tensor, kv, new),)
        return self._made[key][0]

    def _normalised(self, graph: gs.Graph, tensor: gs.Tensor, kv: KvMask, new: list[gs.Node]) -> gs.Tensor:
        base = f"{tensor.name}/stof_kv_{kv.kind.value}"
        root = self._root[id(graph)]
        flat = kv.kind is KvKind.LENGTH or (tensor.shape is not None and len(tensor.shape) == 2)
        if kv.kind is KvKind.MASK and tensor.dtype != np.bool_:
            tensor = self._step(root, new, "Cast", [tensor], f"{base}_bool", to=onnx.TensorProto.BOOL)
        if kv.kind is KvKind.MASK and kv.invert:
            tensor = self._step(root, new, "Not", [tensor], f"{base}_not")
        if not flat:
            shape = self._constant(root, "shape", np.array([0, -1], np.int64))
            tensor = self._step(root, new, "Reshape", [tensor, shape], f"{base}_2d")
        return self._step(root, new, "Cast", [tensor], base, to=onnx.TensorProto.INT32)

    def _constant(self, root: gs.Graph, name: str, array: np.ndarray) -> gs.Constant:
        """The initializer with this content, made once for the main graph or function."""
        digest = hashlib.blake2b(repr((array.dtype.str, array.shape)).encode() + array.tobytes(), digest_size=8)
        full_name = f"stof/{name}/{digest.hexdigest()}"
        known = self._names(root).get(full_name)
        if not isinstance(known, gs.Constant):
            known = gs.Constant(full_name, array)
            self._tensors[id(root)][full_name] = known
        return known

    def _names(self, root: gs.Graph) -> dict[str, gs.Tensor]:
        if id(root) not in self._tensors:
            found: dict[str, gs.Tensor] = {}
            for graph in all_graphs(root):
                found.update(graph.tensors())
                found.update({t.name: t for t in (*graph.inputs, *graph.outputs)})
            self._tensors[id(root)] = found
        return self._tensors[id(root)]

    def _tensor_name(self, root: gs.Graph, name: str) -> str:
        return _fresh(name, self._names(root))

    def _node_name(self, name: str) -> str:
        name = _fresh(name, self._node_names)
        self._node_names.add(name)
        return name


def _bias_array(bias: BiasTerm, dtype: np.dtype) -> np.ndarray:
    """The bias in the dtype of Q where that is exact, else in float32."""
    assert bias.array is not None
    narrow = bias.array.astype(dtype)
    exact = np.array_equal(narrow.astype(np.float64), bias.array.astype(np.float64), equal_nan=True)
    return np.ascontiguousarray(narrow if exact else bias.array.astype(np.float32))


def _index(nodes: Sequence[gs.Node], node: gs.Node) -> int:
    """Position of this very node (graph-surgeon compares nodes by content)."""
    return next(i for i, other in enumerate(nodes) if other is node)


def _fresh(name: str, taken: dict[str, gs.Tensor] | set[str]) -> str:
    number, candidate = 0, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
