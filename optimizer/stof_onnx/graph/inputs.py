"""Graph inputs: the shapes they may take, and initializers that a caller may override."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_graphsurgeon as gs

from stof_onnx.errors import StofError
from stof_onnx.options import DimRange, InputShape, ShapeSpec

if TYPE_CHECKING:
    from stof_onnx.graph.model import LoadedModel


def restore_overridable_inputs(model: LoadedModel) -> None:
    """Turns initializers that are also graph inputs into variables: a caller may feed other values (IR version >= 4).

    graph-surgeon imports them as constants, and folding through one would be wrong. Before IR version 4 every
    initializer had to be listed as input, and runtimes treat it as constant.
    """
    if model.proto.ir_version < 4:
        return
    initializers = {t.name for t in model.proto.graph.initializer}
    tensors = model.graph.tensors()
    for value_info in model.proto.graph.input:
        tensor = tensors.get(value_info.name)
        if value_info.name in initializers and isinstance(tensor, gs.Constant):
            tensor.to_variable(dtype=tensor.export_dtype, shape=list(tensor.shape))
            model.graph.inputs.append(tensor)


def input_ranges(model: LoadedModel) -> dict[str, tuple[DimRange | None, ...]]:
    """For each graph input of known rank the range of each axis; None where nothing bounds it.

    Raises:
        StofError: an input has an axis of size 0.
    """
    ranges: dict[str, tuple[DimRange | None, ...]] = {}
    for tensor in model.graph.inputs:
        if tensor.shape is None:
            continue
        dims: list[DimRange | None] = []
        for dim in tensor.shape:
            if isinstance(dim, int) and dim == 0:
                raise StofError("an axis has size 0", f"input '{tensor.name}'", "Export the model with a real shape")
            if isinstance(dim, int) and dim > 0:
                dims.append(DimRange(dim, dim, dim))
            else:
                dims.append(model.dim_ranges.get(dim) if isinstance(dim, str) else None)
        ranges[tensor.name] = tuple(dims)
    return ranges


def apply_shapes(model: LoadedModel, specs: tuple[ShapeSpec, ...]) -> None:
    """Applies `--shape`: fixes static axes in the graph (and, when saved, in the file), notes the range of the others.

    A symbolic axis (dim_param) that is given a size in one input has it everywhere in the main graph.

    Raises:
        StofError: unknown input, wrong rank, a size that contradicts the model or another `--shape`.
    """
    inputs = {t.name: t for t in model.graph.inputs}
    ranks = {name: None if t.shape is None else len(t.shape) for name, t in inputs.items()}
    given: dict[str, tuple[InputShape, str]] = {}
    for spec in specs:
        shape = spec.resolve(ranks)
        if shape.name in given:
            raise StofError(f"input '{shape.name}' already has a shape", f"--shape {spec.text}", "Give it once")
        given[shape.name] = (shape, f"--shape {spec.text}")
    unnamed: dict[str, dict[int, DimRange]] = {}
    for name, (shape, where) in given.items():
        tensor = inputs[name]
        if tensor.shape is None:
            tensor.shape = [None] * len(shape.dims)
        for axis, (dim, new) in enumerate(zip(tensor.shape, shape.dims, strict=True)):
            _bind(model, dim, axis, new, where, unnamed.setdefault(name, {}))
    _substitute(model, unnamed)
    model.input_ranges = input_ranges(model)
    for name, axes in unnamed.items():
        model.input_ranges[name] = tuple(axes.get(i, r) for i, r in enumerate(model.input_ranges[name]))


def _bind(
    model: LoadedModel, dim: int | str | None, axis: int, new: DimRange, where: str, unnamed: dict[int, DimRange]
) -> None:
    if isinstance(dim, int) and dim > 0:
        if not (new.static and new.opt == dim):
            raise StofError(f"axis {axis} has size {dim} in the model", where, "Give that size, or export it dynamic")
    elif isinstance(dim, str) and dim:
        known = model.dim_ranges.setdefault(dim, new)
        if known != new:
            what = f"axis {axis} is '{dim}', which another --shape gives as {_text(known)}"
            raise StofError(what, where, "Axes of one name have one size")
    else:
        unnamed[axis] = new


def _text(dim: DimRange) -> str:
    return str(dim.opt) if dim.static else f"{dim.min}:{dim.opt}:{dim.max}"


def _substitute(model: LoadedModel, unnamed: dict[str, dict[int, DimRange]]) -> None:
    fixed = {name: r.opt for name, r in model.dim_ranges.items() if r.static}
    for graph in [model.graph, *model.graph.subgraphs(recursive=True)]:
        for tensor in [*graph.tensors().values(), *graph.inputs, *graph.outputs]:
            if isinstance(tensor, gs.Variable) and tensor.shape is not None:
                tensor.shape = [fixed.get(d, d) if isinstance(d, str) else d for d in tensor.shape]
    for tensor in model.graph.inputs:
        for axis, dim in unnamed.get(tensor.name, {}).items():
            if dim.static:
                tensor.shape[axis] = dim.opt
