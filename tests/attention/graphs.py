"""Builds small attention graphs node by node, in the ways exporters write them and in ways they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
Steps = Callable[["Graph", str], str]


@dataclass
class Graph:
    """An ONNX graph that grows by one node a call; `add` returns the name of the node's first output."""

    opset: int = 18
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    prefix: str = ""

    def input(self, name: str, shape: list[int | str], dtype: Any = np.float32) -> str:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def const(self, value: Any, dtype: Any = None) -> str:
        with np.errstate(over="ignore"):
            array = np.asarray(value, dtype=dtype)
        if array.dtype == np.float64 and dtype is None:
            array = array.astype(np.float32)
        name = f"{self.prefix}c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(np.array(values, np.int64))

    def add(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attrs: Any) -> str:
        names = [f"{self.prefix}{op.lower()}{len(self.nodes)}_{i}" for i in range(outputs)]
        node = helper.make_node(op, list(inputs), names, name=f"{self.prefix}{op}_{len(self.nodes)}", **attrs)
        node.domain = domain
        self.nodes.append(node)
        return names[0]

    def many(self, op: str, count: int, *inputs: str, **attrs: Any) -> list[str]:
        self.add(op, *inputs, outputs=count, **attrs)
        return list(self.nodes[-1].output)

    def output(self, *names: str) -> None:
        self.outputs += [helper.make_empty_tensor_value_info(n) for n in names]

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "test", self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("local", 1)]
        model = helper.make_model(graph, opset_imports=opsets, functions=self.functions, ir_version=9)
        inferred = onnx.shape_inference.infer_shapes(model)
        kinds = {v.name: v for v in inferred.graph.output}
        for out in model.graph.output:
            out.CopyFrom(kinds[out.name])
        return model


@dataclass(frozen=True)
class Sizes:
    """Sizes of the attention under test; axes may be names."""

    batch: int | str = 2
    heads: int = 4
    kv_heads: int = 4
    seq_q: int | str = 9
    seq_kv: int | str = 9
    dim: int = 8
    v_dim: int = 8
    dtype: Any = np.float32


def qkv(g: Graph, s: Sizes = Sizes()) -> tuple[str, str, str]:
    """Inputs as projections leave them: [B, S, H*D]."""
    return (
        g.input("q", [s.batch, s.seq_q, s.heads * s.dim], s.dtype),
        g.input("k", [s.batch, s.seq_kv, s.kv_heads * s.dim], s.dtype),
        g.input("v", [s.batch, s.seq_kv, s.kv_heads * s.v_dim], s.dtype),
    )


def heads_first(g: Graph, x: str, heads: int, dim: int) -> str:
    """[B, S, H*D] to [B, H, S, D]."""
    return g.add("Transpose", g.add("Reshape", x, g.ints(0, 0, heads, dim)), perm=[0, 2, 1, 3])


def heads_last(g: Graph, x: str, heads: int, dim: int) -> str:
    """[B, H, S, D] to [B, S, H*D]."""
    return g.add("Reshape", g.add("Transpose", x, perm=[0, 2, 1, 3]), g.ints(0, 0, heads * dim))


def attention(
    g: Graph,
    s: Sizes = Sizes(),
    terms: Steps | None = None,
    probabilities: Steps | None = None,
    scale: float | None = 0.25,
) -> str:
    """The plain form: scores * scale, `terms`, softmax, `probabilities`, values, output in [B, S, H*D]."""
    q, k, v = qkv(g, s)
    qh, kh, vh = (
        heads_first(g, q, s.heads, s.dim),
        heads_first(g, k, s.kv_heads, s.dim),
        heads_first(g, v, s.kv_heads, s.v_dim),
    )
    scores = g.add("MatMul", qh, g.add("Transpose", kh, perm=[0, 1, 3, 2]))
    return finish(g, s, scores, vh, terms, probabilities, scale)


def finish(
    g: Graph,
    s: Sizes,
    scores: str,
    values: str,
    terms: Steps | None = None,
    probabilities: Steps | None = None,
    scale: float | None = 0.25,
) -> str:
    """From raw scores to the output."""
    if scale is not None:
        scores = g.add("Mul", scores, g.const(scale, s.dtype))
    if terms is not None:
        scores = terms(g, scores)
    probs = g.add("Softmax", scores, axis=-1)
    if probabilities is not None:
        probs = probabilities(g, probs)
    out = heads_last(g, g.add("MatMul", probs, values), s.heads, s.v_dim)
    g.output(out)
    return out


def feeds(model: onnx.ModelProto, rng: np.random.Generator, **sizes: int) -> dict[str, np.ndarray]:
    """Random inputs; ints are 0/1 paddings in which key 0 is always seen."""
    result = {}
    for value in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if np.dtype(dtype).kind in "iub":
            array = rng.integers(0, 2, shape).astype(dtype)
            array[..., 0] = 1
        else:
            array = rng.standard_normal(shape).astype(dtype)
        result[value.name] = array
    return result
