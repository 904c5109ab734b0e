"""A piece of a model as an ONNX model of its own, for timing: fixed sizes, random weights, one floating-point type.

Where all its operators treat rows alike, tensors are [rows, width], as lowering makes them between packed attentions.
"""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof_onnx.errors import StofError
from stof_onnx.fusion.projections import projections_of
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


def piece_model(piece: Segment, seed: int = 0) -> onnx.ModelProto:
    """The model of a piece, its inputs and outputs named as in the original.

    Args:
        piece: its tensors have known shapes at the sizes to tune for.
        seed: of the weights.

    Raises:
        StofError: a shape that is not known.
    """
    return _Piece(piece, np.random.default_rng(seed)).build()


def piece_key(piece: Segment) -> str:
    """What the time of a piece depends on: equal ones are timed once, also of different models."""
    return _Piece(piece, np.random.default_rng(0)).key()


def random_array(shape: tuple[int, ...], dtype: np.typing.DTypeLike, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers; a large array repeats a block of them, which is faster to make."""
    block = rng.standard_normal(min(_BLOCK, int(np.prod(shape, dtype=np.int64)) or 1), np.float32)
    return np.resize(block.astype(dtype), shape)


def _stored(kind: int) -> int:
    """The type that a tensor has in the piece: numpy has no bfloat16, which is a flag of TensorRT's then."""
    return TensorProto.FLOAT if kind == TensorProto.BFLOAT16 else kind


class _Piece:
    def __init__(self, piece: Segment, rng: np.random.Generator) -> None:
        self.piece, self.tensors, self.rng = piece, piece.block.tensors, rng
        self.flat = self._row_wise()

    def build(self) -> onnx.ModelProto:
        initializers = [
            self._constant(name) for name in (*self.piece.inputs, *self.piece.constants) if self._fixed(name)
        ]
        inputs = [self._info(name) for name in self.piece.inputs if not self._fixed(name)]
        outputs = [self._info(name) for name in self.piece.outputs]
        nodes = [self._node(operator.node) for operator in self.piece.operators]
        nodes, outputs, packed = self._packed(nodes, outputs)
        read = {name for node in nodes for name in node.input}
        initializers = [tensor for tensor in initializers if tensor.name in read]
        initializers += packed
        if _LAST_AXIS in read:
            initializers.append(numpy_helper.from_array(np.array([-1], np.int64), _LAST_AXIS))
        graph = helper.make_graph(nodes, "piece", inputs, outputs, initializers)
        imports = [o for o in self.tensors.proto.opset_import if o.domain in ("", "ai.onnx")]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)

    def _packed(
        self, nodes: list[onnx.NodeProto], outputs: list[onnx.ValueInfoProto]
    ) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto], list[onnx.TensorProto]]:
        """Projections of one input as one GEMM, as lowering packs them."""
        found = projections_of(self.piece)
        if found is None:
            return nodes, outputs, []
        first = min(self.piece.block.position[o.index] for o in found.operators) - self.piece.start
        gone = {o.index for o in found.operators}
        kept = [n for n, o in zip(nodes, self.piece.operators, strict=True) if o.index not in gone]
        ahead = sum(o.index not in gone for o in self.piece.operators[:first])
        depth, width = found.depth, sum(found.widths)
        weight = random_array((depth, width), np.float32, self.rng) / np.float32(np.sqrt(depth))
        kind = self._type(found.weights[0])
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        made = [numpy_helper.from_array(weight.astype(dtype), "stof/packed_w")]
        new = [helper.make_node("MatMul", [found.x, "stof/packed_w"], ["stof/packed"], "packed")]
        if found.biases:
            made.append(numpy_helper.from_array(random_array((width,), dtype, self.rng), "stof/packed_b"))
            new[0].output[0] = "stof/packed_product"
            new.append(
                helper.make_node("Add", ["stof/packed_product", "stof/packed_b"], ["stof/packed"], "packed bias")
            )
        shape = [d.dim_value for d in self._info(found.outputs[0]).type.tensor_type.shape.dim]
        others = [value for value in outputs if value.name not in found.outputs]
        others.append(helper.make_tensor_value_info("stof/packed", kind, [*shape[:-1], width]))
        return kept[:ahead] + new + kept[ahead:], others, made

    def key(self) -> str:
        """A hash of the model's structure and sizes, whatever its names and weights are."""
        names: dict[str, str] = {"": "", _LAST_AXIS: "last axis"}
        digest = hashlib.blake2b(digest_size=8)
        for name in self.piece.inputs:
            names[name] = f"in{len(names)}"
            info = self._info(name).type.SerializeToString(deterministic=True)
            digest.update(repr((self._fixed(name), info)).encode())
        for name in self.piece.constants:
            value = self.tensors.value(name)
            assert value is not None
            names[name] = f"{value.dtype.str}{value.shape}{value.tobytes().hex()}"
        for i, operator in enumerate(self.piece.operators):
            node = self._node(operator.node)
            names |= {name: f"t{i}.{j}" for j, name in enumerate(node.output) if name}
            timed = [a for a in node.attribute if a.name != "epsilon"]  # no time depends on it
            attributes = sorted(a.SerializeToString(deterministic=True) for a in timed)
            wiring = [names.get(name, name) for name in (*node.input, *node.output)]
            digest.update(repr((node.domain, node.op_type, attributes, wiring)).encode())
        digest.update(repr([names[name] for name in self.piece.outputs]).encode())
        return f"piece {digest.hexdigest()}"

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
        return _stored(self.tensors.types.get(name, 0))

    def _info(self, name: str) -> onnx.ValueInfoProto:
        shape = self._shape(name)
        if self.flat and not self._fixed(name):
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
            value = value.astype(helper.tensor_dtype_to_np_dtype(self._type(name)))
            if self.flat and value.ndim > 1 and value.size == value.shape[-1]:
                value = value.reshape(-1)
        return numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)

    def _node(self, node: onnx.NodeProto) -> onnx.NodeProto:
        made = onnx.NodeProto()
        made.CopyFrom(node)
        for a in made.attribute:
            if a.name == "to":
                a.i = _stored(a.i)
            elif self.flat and node.op_type == "LayerNormalization" and a.name == "axis":
                a.i = -1
            elif self.flat and node.op_type == "ReduceMean" and a.name == "axes":
                a.ints[:] = [-1]
        if self.flat and node.op_type == "Reshape":
            made = helper.make_node("Identity", node.input[:1], node.output, node.name)
        if self.flat and node.op_type == "ReduceMean" and len(node.input) > 1:
            made.input[1] = _LAST_AXIS
        return made
