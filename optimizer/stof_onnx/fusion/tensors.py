"""What fusion reads of a model's main graph: shapes, types, small constants, who makes and who reads a tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof_onnx.attention.functions import DOMAIN
from stof_onnx.graph.external import is_external, read_tensor
from stof_onnx.graph.proto_graph import constant_value, read_names
from stof_onnx.graph.proto_shapes import Dim, infer_shapes

_SMALL = 64  # elements of constants whose values are read; of larger ones only the shape counts
FLOATS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "fp32",
    onnx.TensorProto.FLOAT16: "fp16",
    onnx.TensorProto.BFLOAT16: "bf16",
}


class Tensors:
    """Facts about the tensors of one main graph. Read only.

    Args:
        proto: the model; its initializers may be left out.
        initializers: of the main graph. External ones are read only where they are small.
        sizes: concrete shapes of graph inputs to tune for; without them, shapes with unknown axes have no `opt`.
        base_dir: the folder of external data.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        initializers: Sequence[onnx.TensorProto],
        sizes: Mapping[str, tuple[int, ...]] | None = None,
        base_dir: Path | None = None,
    ) -> None:
        self.proto = proto
        self.nodes = list(proto.graph.node)
        self.initializers = {t.name: t for t in initializers}
        self.base_dir = base_dir or Path()
        self.producer = {name: i for i, node in enumerate(self.nodes) for name in node.output if name}
        self.readers: dict[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            for name in read_names(node):
                self.readers[name].append(i)
        self.graph_outputs = {o.name for o in proto.graph.output}
        light = self.skeleton()
        inferred = infer_shapes(light)
        self.dims, self.types = inferred.dims, inferred.types
        self.types.update({t.name: t.data_type for t in initializers})
        self._opt = infer_shapes(light, sizes).dims if sizes else self.dims
        self._values: dict[str, np.ndarray | None] = {}

    def shape(self, name: str) -> tuple[Dim, ...] | None:
        """The shape with its symbolic axes; None where the rank is not known."""
        return self.dims.get(name)

    def opt(self, name: str) -> tuple[int, ...] | None:
        """The shape at the sizes to tune for; None where it is not known."""
        dims = self._opt.get(name)
        if dims is None or not all(isinstance(d, int) and d > 0 for d in dims):
            return None
        return tuple(int(d) for d in dims if isinstance(d, int))

    def is_constant(self, name: str) -> bool:
        """Whether nothing that is known at run time only goes into it."""
        return name in self._constant_names

    def value(self, name: str) -> np.ndarray | None:
        """The value of a small constant, also behind Identity; None for any other tensor."""
        if name not in self._values:
            self._values[name] = self._read(name)
        return self._values[name]

    def weight(self, name: str) -> onnx.TensorProto | None:
        """The initializer that `name` is, also behind Identity."""
        while name not in self.initializers:
            number = self.producer.get(name)
            if number is None or self.nodes[number].op_type != "Identity" or self.nodes[number].domain:
                return None
            name = self.nodes[number].input[0]
        return self.initializers[name]

    def light(self) -> Tensors:
        """The same facts; of constants whose values nobody reads, shape and type only."""
        assert self._constant_names is not None  # kept, since it is made of what is dropped here
        other = copy(self)
        other.initializers = {name: _without_data(tensor) for name, tensor in self.initializers.items()}
        other.proto = onnx.ModelProto(opset_import=self.proto.opset_import, ir_version=self.proto.ir_version)
        return other

    def _read(self, name: str) -> np.ndarray | None:
        tensor = self.weight(name)
        if tensor is not None:
            if int(np.prod(tensor.dims, dtype=np.int64)) > _SMALL:
                return None
            return read_tensor(tensor, self.base_dir)
        number = self.producer.get(name)
        if number is None:
            return None
        node = self.nodes[number]
        if node.op_type == "Identity" and not node.domain:
            return self.value(node.input[0])
        found = constant_value(node) if node.op_type == "Constant" and not node.domain else None
        return found if found is not None and found.size <= _SMALL else None

    @cached_property
    def _constant_names(self) -> set[str]:
        found = set(self.initializers) - {i.name for i in self.proto.graph.input}
        for node in self.nodes:
            if node.domain in ("", "ai.onnx", DOMAIN) and all(name in found for name in read_names(node)):
                found.update(name for name in node.output if name)
        return found

    def skeleton(self) -> onnx.ModelProto:
        """The model with its initializers, without the data that shape inference has no use for."""
        light = onnx.ModelProto()
        light.CopyFrom(self.proto)
        del light.graph.initializer[:]
        for tensor in self.initializers.values():
            small = int(np.prod(tensor.dims, dtype=np.int64)) <= _SMALL
            if is_external(tensor) and small:
                light.graph.initializer.append(numpy_helper.from_array(read_tensor(tensor, self.base_dir), tensor.name))
            elif is_external(tensor) or tensor.ByteSize() > 1 << 16:
                stub = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                if tensor.name not in {i.name for i in light.graph.input}:
                    light.graph.input.append(stub)
            else:
                light.graph.initializer.append(tensor)
        return light


def _without_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    if int(np.prod(tensor.dims, dtype=np.int64)) <= _SMALL:
        return tensor
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
