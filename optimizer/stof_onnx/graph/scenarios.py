"""The sizes at which a model with dynamic axes is looked at: the largest ones, and probes that differ from them.

What is proven from index maps and values holds for the sizes it was computed at; agreeing at the largest sizes and at
probes with other, mutually different sizes is what makes a statement about a dynamic axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stof_onnx.graph.fold import Folder
from stof_onnx.graph.shapes import Scenario
from stof_onnx.options import DimRange

if TYPE_CHECKING:
    from stof_onnx.graph.model import LoadedModel

# Sizes for axes that nothing bounds, by position: the largest scenario, then the probes.
_FREE = ((2, 37, 41, 43), (3, 23, 29, 31), (5, 11, 13, 19))
# Probes keep different axes apart by these steps.
_APART = (3, 2)


@dataclass(frozen=True)
class _DynamicAxis:
    """One size that can vary: everything that has this key."""

    key: tuple[object, ...]
    axis: int
    leading: bool
    range: DimRange | None
    order: int

    def size(self, which: int) -> int:
        """Its size in the largest scenario (0) or in probe 1 or 2."""
        apart = 0 if which == 0 else self.order * _APART[which - 1]
        if self.range is None:
            return _FREE[which][min(self.axis, 3)] + apart
        low, high = self.range.min, self.range.max
        if self.leading:
            # Batch entries are alike: a small batch saves memory.
            main = min(high, max(low, 2))
            found = min(high, max(low, (2, 3, 5)[which] + apart)) if which else main
            return found if which == 0 or found != main else low if low < main else high
        wanted = (high, high - 1, (low + high) // 2 - 1)[which]
        return max(low, min(high, wanted - apart))


@dataclass
class Family:
    """The scenarios of one model.

    Attributes:
        main: the scenario in which everything is encoded.
        probes: others; `unbounded[i]` tells whether probe i changes an axis that nothing bounds.
    """

    model: LoadedModel
    main: Folder
    probes: tuple[Folder, ...]
    unbounded: tuple[bool, ...]
    axes: tuple[_DynamicAxis, ...]
    where: dict[str, tuple[int | _DynamicAxis, ...]]
    names: dict[str, _DynamicAxis]

    def folders(self) -> Iterator[Folder]:
        yield self.main
        yield from self.probes

    def lengths(self) -> range:
        """Every size of the one bounded dynamic axis that is no batch; empty when there are several."""
        ranges = [a.range for a in self.axes if not a.leading and a.range is not None]
        return range(ranges[0].min, ranges[0].max + 1) if len(ranges) == 1 else range(0)

    def at(self, length: int) -> Folder:
        """The scenario with every bounded dynamic axis that is no batch at `length`."""
        sizes = {a: length if not a.leading and a.range is not None else a.size(0) for a in self.axes}
        return Folder(self.model, _scenario(self.where, self.names, sizes))


def build_family(model: LoadedModel) -> Family:
    """Reads the dynamic axes of the graph inputs and builds the scenarios.

    Axes of different names vary apart from each other, unless the graph then has no consistent shapes: exporters give
    the same size a name in each input.
    """
    family = _family(model, tied=False)
    if family.axes and any(f.shapes.failures > family.main.shapes.failures for f in family.probes):
        family = _family(model, tied=True)
    for folder in family.folders():
        folder.family = family
    return family


def _family(model: LoadedModel, tied: bool) -> Family:
    axes, where, names = _axes(model, tied)
    main = {a: a.size(0) for a in axes}
    bounded = {a: a.size(1) if a.range is not None else a.size(0) for a in axes}
    free = {a: a.size(1) if a.range is None else a.size(0) for a in axes}
    both = {a: a.size(2) for a in axes}
    chosen, flags = [], []
    for sizes in (bounded, free, both):
        if sizes != main and sizes not in chosen:
            chosen.append(sizes)
            flags.append(any(a.range is None and sizes[a] != main[a] for a in sizes))
    return Family(
        model,
        Folder(model, _scenario(where, names, main)),
        tuple(Folder(model, _scenario(where, names, sizes)) for sizes in chosen),
        tuple(flags),
        axes,
        where,
        names,
    )


def _axes(
    model: LoadedModel, tied: bool
) -> tuple[tuple[_DynamicAxis, ...], dict[str, tuple[int | _DynamicAxis, ...]], dict[str, _DynamicAxis]]:
    """The independent dynamic axes, and for each graph input its sizes or axes."""
    places: dict[tuple[object, ...], tuple[int, DimRange | None]] = {}
    leading: dict[tuple[object, ...], bool] = {}
    keyed: dict[str, list[tuple[object, ...] | int]] = {}
    names: dict[str, tuple[object, ...]] = {}
    for tensor in model.graph.inputs:
        if tensor.shape is None:
            continue
        ranges = model.input_ranges.get(tensor.name, (None,) * len(tensor.shape))
        dims: list[tuple[object, ...] | int] = []
        for axis, (dim, known) in enumerate(zip(tensor.shape, ranges, strict=True)):
            if known is not None and known.static:
                dims.append(known.max)
                continue
            named = isinstance(dim, str) and bool(dim)
            key: tuple[object, ...] = (known, axis)
            if named:
                key = names.setdefault(str(dim), key if tied else ("name", dim))
            dims.append(key)
            leading[key] = leading.get(key, True) and axis == 0 and len(tensor.shape) > 1
            places.setdefault(key, (axis, known))
        keyed[tensor.name] = dims
    made = {
        key: _DynamicAxis(key, axis, leading[key], known, order)
        for order, (key, (axis, known)) in enumerate(places.items())
    }
    where = {name: tuple(d if isinstance(d, int) else made[d] for d in dims) for name, dims in keyed.items()}
    return tuple(made.values()), where, {name: made[key] for name, key in names.items()}


def _scenario(
    where: dict[str, tuple[int | _DynamicAxis, ...]], names: dict[str, _DynamicAxis], sizes: dict[_DynamicAxis, int]
) -> Scenario:
    inputs = {name: tuple(d if isinstance(d, int) else sizes[d] for d in dims) for name, dims in where.items()}
    return Scenario(inputs, {name: sizes[axis] for name, axis in names.items()})
