"""What each graph input is for, read from how the graph uses it: ids and their range, masks, positions, values."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx

from stof_onnx.graph.walk import node_graphs

# Operators through which an index keeps its value.
_KEEPS_VALUE = {
    "Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Flatten", "Transpose", "Slice", "Where", "Concat",
    "Clip", "Split", "GatherND",
}  # fmt: skip
_EMBED_TABLES = {0: 2, 1: 4}  # com.microsoft EmbedLayerNormalization: ids and segments, and the tables they index


class Role(enum.Enum):
    """How an input is filled: see `samples`."""

    IDS = "ids"
    MASK = "mask"
    POSITIONS = "positions"
    VALUES = "values"


@dataclass(frozen=True)
class InputRole:
    """An input, its element type, its axes (a size, a name, or None) and its role; ids are below `limit`."""

    name: str
    dtype: np.dtype
    dims: tuple[int | str | None, ...]
    role: Role
    limit: int = 0


def input_roles(proto: onnx.ModelProto, paddings: Iterable[str] = ()) -> list[InputRole]:
    """The role of every input that a caller has to feed (initializers have their values).

    Args:
        paddings: tensors known to be run-time padding; inputs that they are computed from are masks.
    """
    given = {t.name for t in proto.graph.initializer}
    masks = _sources(proto.graph, paddings)
    limits = _index_limits(proto)
    roles = []
    for value_info in proto.graph.input:
        name = value_info.name
        if name in given:
            continue
        tensor_type = value_info.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type)
        dims = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor_type.shape.dim)
        limit = limits.get(name, 0)
        is_integer = dtype.kind in "iu"
        if "position" in name and is_integer:
            role = Role.POSITIONS
        elif name in masks or "mask" in name or dtype.kind == "b":
            role = Role.MASK
        elif is_integer and limit:
            role = Role.IDS
        elif is_integer:
            role, limit = Role.IDS, 2
        else:
            role = Role.VALUES
        roles.append(InputRole(name, dtype, dims, role, limit))
    return roles


def _sources(graph: onnx.GraphProto, names: Iterable[str]) -> set[str]:
    """Graph inputs of at most two axes that `names` are computed from."""
    producer = {o: n for n in graph.node for o in n.output}
    small = {i.name for i in graph.input if len(i.type.tensor_type.shape.dim) <= 2}
    found: set[str] = set()
    seen: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in small:
            found.add(name)
        node = producer.get(name)
        if node is not None and node.op_type not in ("Shape", "Gather", "Size"):
            stack += node.input
    return found


def _index_limits(proto: onnx.ModelProto) -> dict[str, int]:
    """For each input that ends as index of a Gather: the size of the smallest axis it indexes."""
    functions = {(f.domain, f.name): f for f in proto.functions}
    sizes = {t.name: tuple(t.dims) for t in proto.graph.initializer}
    for value_info in [*proto.graph.value_info, *proto.graph.input]:
        dims = value_info.type.tensor_type.shape.dim
        sizes.setdefault(value_info.name, tuple(d.dim_value for d in dims))
    limits: dict[str, int] = {}
    for value_info in proto.graph.input:
        found = _follow(proto.graph.node, {value_info.name}, sizes, functions)
        if found:
            limits[value_info.name] = min(found)
    return limits


def _follow(
    nodes: Iterable[onnx.NodeProto],
    names: set[str],
    sizes: dict[str, tuple[int, ...]],
    functions: dict[tuple[str, str], onnx.FunctionProto],
) -> list[int]:
    names = set(names)
    found: list[int] = []
    for node in nodes:  # in topological order
        hits = [i for i, name in enumerate(node.input) if name in names]
        for inner in node_graphs(node):
            found += _follow(inner.node, names, sizes, functions)
        if not hits:
            continue
        function = functions.get((node.domain, node.op_type))
        if function is not None:
            inside = {formal for formal, actual in zip(function.input, node.input, strict=False) if actual in names}
            known = {f: sizes[a] for f, a in zip(function.input, node.input, strict=False) if a in sizes}
            found += _follow(function.node, inside, known, functions)
        elif node.op_type == "Gather" and 1 in hits:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            found += _size(sizes, node.input[0], axis)
        elif node.op_type == "EmbedLayerNormalization":
            for i, table in _EMBED_TABLES.items():
                if i in hits:
                    found += _size(sizes, node.input[table], 0)
        elif node.op_type in _KEEPS_VALUE:
            names.update(node.output)
    return found


def _size(sizes: dict[str, tuple[int, ...]], name: str, axis: int) -> list[int]:
    shape = sizes.get(name, ())
    return [shape[axis]] if -len(shape) <= axis < len(shape) and shape[axis] > 0 else []
