"""A piece of a model as an ONNX model of its own, for timing: fixed sizes, random weights, one floating-point type.

Where all its operators treat rows alike, tensors are [rows, width], as lowering makes them between packed attentions.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof_onnx.errors import StofError
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.tensors import FLOATS

# fmt: off
_ROW_WISE = frozenset({
    "Abs", "Add", "Cast", "Div", "Erf", "Exp", "Gelu", "Gemm", "Identity", "LayerNormalization", "Log", "MatMul", "Max",
    "Mul", "Neg", "Pow", "Reciprocal", "ReduceMean", "Relu", "Reshape", "Sigmoid", "Sqrt", "Sub", "Tanh",
})
# fmt: on
_LAST_AXIS = "stof/last_axis"
_BLOCK = 1 << 16  # random numbers that are drawn; larger weights repeat them


def piece_model(piece: Segment, precision: str, seed: int = 0) -> onnx.ModelProto:
    """The model of a piece, its inputs and outputs named as in the original.

    Args:
        piece: its tensors have known shapes at the sizes to tune for.
        precision: "fp16" makes all floating-point tensors float16, others float32 (bf16 is a flag of TensorRT's then).
        seed: of the weights.

    Raises:
        StofError: a shape that is not known.
    """
    return _Piece(piece, precision, np.random.default_rng(seed)).build()


def random_array(shape: tuple[int, ...], dtype: np.typing.DTypeLike, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers; a large array repeats a block of them, which is faster to make."""
    block = rng.standard_normal(min(_BLOCK, int(np.prod(shape, dtype=np.int64)) or 1), np.float32)
    return np.resize(block.astype(dtype), shape)


class _Piece:
    def __init__(self, piece: Segment, precision: str, rng: np.random.Generator) -> None:
        self.piece, self.tensors, self.rng = piece, piece.block.tensors, rng
        self.kind = TensorProto.FLOAT16 if precision == "fp16" else TensorProto.FLOAT
        self.dtype = np.float16 if precision == "fp16" else np.float32
        self.flat = self._row_wise()

    def build(self) -> onnx.ModelProto:
        initializers = [
            self._constant(name) for name in (*self.piece.inputs, *self.piece.constants) if self._fixed(name)
        ]
        inputs = [self._info(name) for name in self.piece.inputs if not self._fixed(name)]
        outputs = [self._info(name) for name in self.piece.outputs]
        nodes = [self._node(operator.node) for operator in self.piece.operators]
        read = {name for node in nodes for name in node.input}
        initializers = [tensor for tensor in initializers if tensor.name in read]
        if _LAST_AXIS in read:
            initializers.append(numpy_helper.from_array(np.array([-1], np.int64), _LAST_AXIS))
        graph = helper.make_graph(nodes, "piece", inputs, outputs, initializers)
        imports = [o for o in self.tensors.proto.opset_import if o.domain in ("", "ai.onnx")]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)

    def _row_wise(self) -> bool:
        names = [n for n in (*self.piece.inputs, *self.piece.made) if not self._fixed(n)]
        shapes = [self._shape(name) for name in names]
        rows = {int(np.prod(shape[:-1], dtype=np.int64)) for shape in shapes}
        known = all(operator.op in _ROW_WISE for operator in self.piece.operators)
        floating = all(self.tensors.types.get(name) in FLOATS for name in names)
        return known and floating and len(rows) == 1 and all(len(shape) in (2, 3) for shape in shapes)

    def _fixed(self, name: str) -> bool:
        return self.tensors.is_constant(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.tensors.opt(name)
        if shape is None:
            raise StofError(f"the shape of '{name}' is not known", "fusion", "Give --shape for every dynamic input")
        return shape

    def _type(self, name: str) -> int:
        kind = self.tensors.types.get(name, 0)
        return self.kind if kind in FLOATS else kind

    def _info(self, name: str) -> onnx.ValueInfoProto:
        shape = self._shape(name)
        if self.flat:
            shape = (int(np.prod(shape[:-1], dtype=np.int64)), shape[-1])
        return helper.make_tensor_value_info(name, self._type(name), shape)

    def _constant(self, name: str) -> onnx.TensorProto:
        """Numbers, shapes and axes as they are; weights at random, of a size that keeps activations in range."""
        value = self.tensors.value(name)
        if value is None or value.size > 1:
            shape = tuple(value.shape) if value is not None else self._shape(name)
            if value is None or value.dtype.kind == "f":
                scale = np.sqrt(shape[0]) if len(shape) == 2 and shape[0] > 1 else 1.0
                value = random_array(shape, np.float32, self.rng) / np.float32(scale)
        if value.dtype.kind == "f":
            value = value.astype(self.dtype)
            if self.flat and value.ndim > 1 and value.size == value.shape[-1]:
                value = value.reshape(-1)
        return numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)

    def _node(self, node: onnx.NodeProto) -> onnx.NodeProto:
        made = onnx.NodeProto()
        made.CopyFrom(node)
        for a in made.attribute:
            if a.name == "to" and a.i in FLOATS:
                a.i = self.kind
            elif self.flat and node.op_type == "LayerNormalization" and a.name == "axis":
                a.i = -1
            elif self.flat and node.op_type == "ReduceMean" and a.name == "axes":
                a.ints[:] = [-1]
        if self.flat and node.op_type == "Reshape":
            made = helper.make_node("Identity", node.input[:1], node.output, node.name)
        if self.flat and node.op_type == "ReduceMean" and len(node.input) > 1:
            made.input[1] = _LAST_AXIS
        return made
