"""ONNX `Attention` spelled out by its definition: a runtime's kernel may differ in what rows without keys yield.

ONNX Runtime's kernel gives zeros where every key has the lowest finite number as mask; by the definition such a row is
an ordinary softmax. Rows whose every key is masked by a boolean or by -inf yield zeros in both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from stof_onnx.graph.walk import all_graphs

_PLAIN_INPUTS = 4  # Q, K, V, attn_mask; past keys and lengths are left to the runtime's kernel
_SOFTCAP_FIRST = 25  # before this version releases disagree on softcap beside a mask: left to the kernel


def spell_out_attention(proto: onnx.ModelProto) -> None:
    """Replaces the Attention nodes of the main graph and its subgraphs, in place, by plain operators.

    A node stays when it has past keys, further outputs, a softcap beside a mask of an early version, or a query whose
    rank can not be inferred.
    """
    version = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    graphs = [g for g in all_graphs(proto.graph) if any(_is_attention(n) for n in g.node)]
    if not graphs:
        return
    types = _types(proto)
    for number, graph in enumerate(graphs):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            written = _Writer(node, types, version, f"{number}_{len(nodes)}").write() if _is_attention(node) else None
            nodes += [node] if written is None else written
        kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del graph.node[:]
        graph.node.extend(kept)


def _is_attention(node: onnx.NodeProto) -> bool:
    return node.op_type == "Attention" and node.domain in ("", "ai.onnx")


def _types(proto: onnx.ModelProto) -> dict[str, onnx.TypeProto.Tensor]:
    inferred = shape_inference.infer_shapes(proto)
    found: dict[str, onnx.TypeProto.Tensor] = {}
    for graph in all_graphs(inferred.graph):
        for tensor in graph.initializer:
            found[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type
        for value in (*graph.input, *graph.output, *graph.value_info):
            found[value.name] = value.type.tensor_type
    return found


class _Writer:
    def __init__(
        self, node: onnx.NodeProto, types: dict[str, onnx.TypeProto.Tensor], version: int, prefix: str
    ) -> None:
        self.node = node
        self.types = types
        self.version = version
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}

    def write(self) -> list[onnx.NodeProto] | None:
        """The nodes that compute the output, or None where the node has to stay."""
        node, attributes = self.node, self.attributes
        inputs = [*node.input, *[""] * _PLAIN_INPUTS][:_PLAIN_INPUTS]
        q, k, v, mask = inputs
        query = self.types.get(q)
        if query is None or not query.HasField("shape") or any(node.input[_PLAIN_INPUTS:]) or any(node.output[1:]):
            return None
        softcap = attributes.get("softcap", 0.0)
        masked = mask or attributes.get("is_causal", 0)
        if (softcap and masked and self.version < _SOFTCAP_FIRST) or (mask and mask not in self.types):
            return None
        dtype = query.elem_type
        flat = len(query.shape.dim) == 3
        if flat:
            heads = attributes["q_num_heads"]
            kv_heads = attributes["kv_num_heads"]
            q, k, v = (self._split(t, n) for t, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        scale = attributes.get("scale")
        if scale is None:
            width = self._op("Cast", self._sizes(q, 3), to=dtype)
            root = self._op("Sqrt", self._op("Sqrt", width))
            q, k = self._op("Div", q, root), self._op("Div", k, root)
        else:
            root = self._value(np.sqrt(np.float32(scale)), dtype)
            q, k = self._op("Mul", q, root), self._op("Mul", k, root)
        k, v = self._repeat(k, q), self._repeat(v, q)
        scores = self._op("MatMul", q, self._op("Transpose", k, perm=[0, 1, 3, 2]))
        if softcap:
            cap = self._value(softcap, dtype)
            scores = self._op("Mul", self._op("Tanh", self._op("Div", scores, cap)), cap)
        if attributes.get("is_causal", 0):
            allowed = self._causal(scores)
            scores = self._op("Where", allowed, scores, self._value(-np.inf, dtype))
        if mask:
            scores = self._masked(scores, mask, dtype)
        precision = attributes.get("softmax_precision", dtype)
        weights = self._op("Softmax", self._op("Cast", scores, to=precision), axis=-1)
        weights = self._op("Cast", weights, to=dtype)
        weights = self._op("Where", self._op("IsNaN", weights), self._value(0, dtype), weights)
        if flat:
            out = self._op("Transpose", self._op("MatMul", weights, v), perm=[0, 2, 1, 3])
            self._op("Reshape", out, self._ints(0, 0, -1), output=node.output[0])
        else:
            self._op("MatMul", weights, v, output=node.output[0])
        return self.nodes

    def _masked(self, scores: str, mask: str, dtype: int) -> str:
        if self.types[mask].elem_type == TensorProto.BOOL:
            return self._op("Where", mask, scores, self._value(-np.inf, dtype))
        return self._op("Add", scores, mask)

    def _causal(self, scores: str) -> str:
        """Keys up to the query's own position, counted from the upper left."""
        size = self._op("Concat", self._sizes(scores, 2), self._sizes(scores, 3), axis=0)
        ones = self._op("Expand", self._value(1, TensorProto.INT64), size)
        return self._op("Cast", self._op("Trilu", ones, upper=0), to=TensorProto.BOOL)

    def _split(self, tensor: str, heads: int) -> str:
        return self._op("Transpose", self._op("Reshape", tensor, self._ints(0, 0, heads, -1)), perm=[0, 2, 1, 3])

    def _repeat(self, tensor: str, query: str) -> str:
        """K or V [batch, kv_heads, keys, d] with each head repeated for its group of query heads."""
        heads, kv_heads = self._sizes(query, 1), self._sizes(tensor, 1)
        groups = self._op("Div", heads, kv_heads)
        one = self._ints(1)
        shape = self._op("Concat", one, one, groups, one, one, axis=0)
        wide = self._op("Expand", self._op("Unsqueeze", tensor, self._ints(2)), shape)
        tail = self._op("Concat", self._ints(0), heads, self._sizes(tensor, 2), self._sizes(tensor, 3), axis=0)
        return self._op("Reshape", wide, tail)

    def _sizes(self, tensor: str, axis: int) -> str:
        """The size of one axis, as a tensor of one element."""
        return self._op("Slice", self._op("Shape", tensor), self._ints(axis), self._ints(axis + 1))

    def _ints(self, *values: int) -> str:
        return self._constant(np.array(values, np.int64))

    def _value(self, value: float, dtype: int) -> str:
        return self._constant(np.array(value).astype(helper.tensor_dtype_to_np_dtype(dtype)))

    def _constant(self, value: np.ndarray) -> str:
        return self._op("Constant", value=numpy_helper.from_array(value))

    def _op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{self.node.output[0]}__{self.prefix}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output
