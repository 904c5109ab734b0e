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


@dataclass(frozen=True)
class _DynamicAxis:
    """One size that can vary: everything that has this name, or the same range at the same position."""

    key: tuple[object, ...]
    axis: int
    leading: bool
    range: DimRange | None

    def size(self, which: int) -> int:
        """Its size in the largest scenario (0) or in probe 1 or 2."""
        if self.range is None:
            return _FREE[which][min(self.axis, 3)]
        low, high = self.range.min, self.range.max
        if self.leading:
            # Batch entries are alike: a small batch saves memory.
            return min(high, max(low, (2, 3, 5)[which]))
        return (high, max(low, high - 1), max(low, min(high, (low + high) // 2 - 1)))[which]


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

    def folders(self) -> Iterator[Folder]:
        yield self.main
        yield from self.probes

    def lengths(self) -> range:
        """Every size of the bounded dynamic axes that are not batches, when they vary together; else empty."""
        ranges = {a.range for a in self.axes if not a.leading and a.range is not None}
        if len(ranges) != 1:
            return range(0)
        (only,) = ranges
        return range(only.min, only.max + 1)

    def at(self, length: int) -> Folder:
        """The scenario with every bounded dynamic axis that is no batch at `length`."""
        sizes = {a: length if not a.leading and a.range is not None else a.size(0) for a in self.axes}
        return Folder(self.model, _scenario(self.where, sizes))


def build_family(model: LoadedModel) -> Family:
    """Reads the dynamic axes of the graph inputs and builds the scenarios."""
    axes: dict[tuple[object, ...], _DynamicAxis] = {}
    where: dict[str, tuple[int | _DynamicAxis, ...]] = {}
    leading: dict[tuple[object, ...], bool] = {}
    keyed: dict[str, list[tuple[object, ...] | int]] = {}
    for tensor in model.graph.inputs:
        if tensor.shape is None:
            continue
        ranges = model.input_ranges.get(tensor.name, (None,) * len(tensor.shape))
        dims: list[tuple[object, ...] | int] = []
        for axis, (dim, known) in enumerate(zip(tensor.shape, ranges, strict=True)):
            if known is not None and known.static:
                dims.append(known.max)
                continue
            key: tuple[object, ...] = ("range", known, axis) if known is not None else ("free", axis)
            if isinstance(dim, str) and dim:
                key = ("named", dim)
            dims.append(key)
            leading[key] = leading.get(key, True) and axis == 0 and len(tensor.shape) > 1
            axes.setdefault(key, _DynamicAxis(key, axis, False, known))
        keyed[tensor.name] = dims
    final = {k: _DynamicAxis(a.key, a.axis, leading[k], a.range) for k, a in axes.items()}
    for name, dims in keyed.items():
        where[name] = tuple(d if isinstance(d, int) else final[d] for d in dims)
    main = {a: a.size(0) for a in final.values()}
    bounded = {a: a.size(1) if a.range is not None else a.size(0) for a in final.values()}
    free = {a: a.size(1) if a.range is None else a.size(0) for a in final.values()}
    both = {a: a.size(2) for a in final.values()}
    chosen, flags = [], []
    for sizes in (bounded, free, both):
        if sizes != main and sizes not in chosen:
            chosen.append(sizes)
            flags.append(any(a.range is None and sizes[a] != main[a] for a in sizes))
    family = Family(
        model,
        Folder(model, _scenario(where, main)),
        tuple(Folder(model, _scenario(where, sizes)) for sizes in chosen),
        tuple(flags),
        tuple(final.values()),
        where,
    )
    for folder in family.folders():
        folder.family = family
    return family


def _scenario(where: dict[str, tuple[int | _DynamicAxis, ...]], sizes: dict[_DynamicAxis, int]) -> Scenario:
    inputs = {name: tuple(d if isinstance(d, int) else sizes[d] for d in dims) for name, dims in where.items()}
    symbols = {str(a.key[1]): size for a, size in sizes.items() if a.key[0] == "named"}
    return Scenario(inputs, symbols)
