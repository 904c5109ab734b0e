"""Small graphs in an exporter's spelling: what regions are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import find_blocks
from stof_onnx.fusion.tensors import Tensors


@dataclass
class GraphBuilder:
    """Collects nodes and initializers; every method returns the name of a tensor."""

    rng: np.random.Generator
    dtype: type = np.float32
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: dict[str, list[int | str]] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: object) -> str:
        output = output or f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], f"node{len(self.nodes)}", **attributes))
        return output

    def const(self, value: object, dtype: type | None = None) -> str:
        array = np.ascontiguousarray(np.asarray(value, dtype or self.dtype))
        array = array.reshape(np.shape(value))
        self.initializers.append(numpy_helper.from_array(array, f"c{len(self.initializers)}"))
        return self.initializers[-1].name

    def input(self, name: str, *shape: int | str) -> str:
        self.inputs[name] = list(shape)
        return name

    def vector(self, size: int) -> str:
        return self.const(self.rng.standard_normal(size))

    def weight(self, depth: int, width: int) -> str:
        return self.const(self.rng.standard_normal((depth, width)) / np.sqrt(depth))

    def model(self, *outputs: str, opset: int = 17) -> onnx.ModelProto:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info(n, kind, s) for n, s in self.inputs.items()],
            [helper.make_tensor_value_info(n, kind, None) for n in outputs],
            self.initializers,
        )
        for output in graph.output:
            output.type.tensor_type.ClearField("shape")
        domains = {"": opset, "stof": 1} if any(n.domain for n in self.nodes) else {"": opset}
        imports = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
        model = helper.make_model(graph, opset_imports=imports, ir_version=8)
        for output, inferred in zip(graph.output, shape_inference.infer_shapes(model).graph.output, strict=True):
            output.CopyFrom(inferred)
        model.graph.CopyFrom(graph)
        return model

    def feeds(self, sizes: dict[str, int] | None = None) -> dict[str, np.ndarray]:
        shapes = {n: [(sizes or {}).get(d, d) for d in s] for n, s in self.inputs.items()}
        return {n: self.rng.standard_normal(s).astype(self.dtype) for n, s in shapes.items()}


def tensors_of(model: onnx.ModelProto, sizes: dict[str, tuple[int, ...]] | None = None) -> Tensors:
    return Tensors(model, list(model.graph.initializer), sizes)


def whole(model: onnx.ModelProto) -> Segment:
    """All operators of a model without attentions as one segment."""
    (block,) = find_blocks(tensors_of(model))
    return Segment(block, 0, len(block))


def gelu_erf(b: GraphBuilder, x: str, spelling: int) -> str:
    """x (1 + erf(x / √2)) / 2 as TorchScript, dynamo and others write it."""
    root = b.op("Div", x, b.const(np.sqrt(2))) if spelling % 2 else b.op("Mul", x, b.const(np.sqrt(0.5)))
    gate = b.op("Add", b.op("Erf", root), b.const(1.0))
    if spelling // 2 == 0:
        return b.op("Mul", b.op("Mul", x, gate), b.const(0.5))
    if spelling // 2 == 1:
        return b.op("Mul", b.op("Mul", b.const(0.5), x), gate)
    return b.op("Mul", x, b.op("Mul", gate, b.const(0.5)))


def gelu_tanh(b: GraphBuilder, x: str, spelling: int) -> str:
    """x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    scale, cube = np.sqrt(2 / np.pi), 0.044715
    if spelling == 0:
        inner = b.op("Add", x, b.op("Mul", b.op("Pow", x, b.const(3.0)), b.const(cube)))
        inner = b.op("Mul", inner, b.const(scale))
    elif spelling == 1:
        power = b.op("Mul", b.op("Mul", x, x), x)
        inner = b.op("Mul", b.const(scale), b.op("Add", b.op("Mul", b.const(cube), power), x))
    else:
        square = b.op("Add", b.op("Mul", b.const(cube), b.op("Mul", x, x)), b.const(1.0))
        inner = b.op("Mul", b.op("Mul", x, b.const(scale)), square)
    gate = b.op("Add", b.op("Tanh", inner), b.const(1.0))
    return b.op("Mul", b.op("Mul", x, b.const(0.5)), gate)
