"""Shapes of tensors for lowering: as inferred for the symbolic axes of the model, and at concrete sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import onnx
from onnx import helper, shape_inference

from stof_onnx.graph.fold_small import fold_small
from stof_onnx.graph.proto_graph import all_graphs

Dim = int | str | None
_LARGE = 4096  # initializers with more elements are weights: inference needs their shapes only


class Inferred(NamedTuple):
    """Shapes and element types by tensor name."""

    dims: dict[str, tuple[Dim, ...]]
    types: dict[str, int]


def infer_shapes(model: onnx.ModelProto, sizes: Mapping[str, tuple[int, ...]] | None = None) -> Inferred:
    """What ONNX's inference finds, functions included; None for an axis it does not know.

    Args:
        model: only read.
        sizes: concrete shapes of graph inputs, in place of the model's own.
    """
    light = _without_weights(model)
    for value in light.graph.input:
        if sizes and value.name in sizes:
            value.CopyFrom(
                helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, sizes[value.name])
            )
    if sizes:
        del light.graph.value_info[:]
    if sizes or any(not d.HasField("dim_value") for v in model.graph.input for d in v.type.tensor_type.shape.dim):
        for output in light.graph.output:  # whoever makes an input dynamic may forget what the outputs were declared as
            output.type.tensor_type.ClearField("shape")
    found = _infer(light, model)
    while fold_small(light, found.dims):
        found = _infer(light, model)
    return found


def _infer(light: onnx.ModelProto, model: onnx.ModelProto) -> Inferred:
    inferred = shape_inference.infer_shapes(light, data_prop=True)
    found: dict[str, tuple[Dim, ...]] = {i.name: tuple(i.dims) for g in all_graphs(model.graph) for i in g.initializer}
    found |= {i.name: tuple(i.dims) for i in light.graph.initializer}
    types: dict[str, int] = {i.name: i.data_type for i in light.graph.initializer}
    for graph in all_graphs(inferred.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            types[value.name] = value.type.tensor_type.elem_type
            if value.type.tensor_type.HasField("shape"):
                found[value.name] = tuple(map(_dim, value.type.tensor_type.shape.dim))
    return Inferred(found, types)


class SymbolicShapes:
    """Shapes by name, and which 2-D tensors hold the rows [B*S, width] of which 3-D tensor [B, S, *]."""

    def __init__(self, inferred: Inferred) -> None:
        self.dims, self.types = dict(inferred.dims), dict(inferred.types)
        self.rows_of: dict[str, str] = {}

    def rank(self, name: str) -> int | None:
        return len(self.dims[name]) if name in self.dims else None

    def dim(self, name: str, axis: int) -> Dim:
        return self.dims[name][axis] if name in self.dims else None

    def leading(self, name: str) -> tuple[Dim, ...]:
        """Batch and sequence of a 3-D tensor."""
        return self.dims[name][:2]

    def note_flats(self, names: Iterable[str], rows_of: str, width: int) -> None:
        """`names` are [B*S, width] with the rows of `rows_of`."""
        for name in names:
            self.dims[name] = (None, width)
            self._note(name, rows_of)

    def note_same_rows(self, name: str, rows_of: str, width: int) -> None:
        """`name` is [B, S, width] with the batch and sequence of `rows_of`."""
        self.dims[name] = (*self.leading(rows_of), width)
        self._note(name, rows_of)

    def _note(self, name: str, rows_of: str) -> None:
        self.rows_of[name] = rows_of
        self.types[name] = self.types.get(rows_of, onnx.TensorProto.UNDEFINED)

    def refreshed(self, model: onnx.ModelProto) -> SymbolicShapes:
        """Inferred anew for an edited model, whose plugin nodes ONNX's inference knows nothing of."""
        noted = onnx.ModelProto()
        noted.CopyFrom(model)
        unknown = {n for node in model.graph.node if node.domain for n in node.output} | set(self.rows_of)
        ours = {name for name in unknown if name in self.dims and self.types.get(name)}
        declared = [value for value in noted.graph.value_info if value.name not in ours]  # exporters may know less
        del noted.graph.value_info[:]
        noted.graph.value_info.extend(declared)
        for name in sorted(unknown):
            if name in ours:
                # Axes that inference has named itself may get other names this time.
                dims = [None if isinstance(d, str) and d.startswith("unk__") else d for d in self.dims[name]]
                noted.graph.value_info.append(helper.make_tensor_value_info(name, self.types[name], dims))
        shapes = SymbolicShapes(infer_shapes(noted))
        shapes.rows_of = dict(self.rows_of)
        return shapes


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or None


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose large initializers are graph inputs of the same shape."""
    light = onnx.ModelProto()
    light.CopyFrom(
        onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    )
    graph = model.graph
    light.graph.name = graph.name
    for part in ("node", "input", "output", "value_info"):
        getattr(light.graph, part).extend(getattr(graph, part))
    declared = {value.name for value in graph.input}
    for tensor in graph.initializer:
        count = 1
        for size in tensor.dims:
            count *= size
        if count > _LARGE:
            if tensor.name not in declared:
                light.graph.input.append(
                    helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                )
        else:
            light.graph.initializer.append(tensor)
    return light
