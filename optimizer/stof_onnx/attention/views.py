"""Exact index maps of tensors that only move data: which element of a base tensor each element of a view is.

A view has axes; each axis is a list of factors (extent, stride), the last varying fastest, over the flat base. That is
closed under Transpose, Reshape, Expand, Slice, Split and the like, costs nothing at any size, and two maps are equal
exactly when their reduced factors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Factor = tuple[int, int]  # extent, stride
Axis = tuple[Factor, ...]


@dataclass(frozen=True)
class View:
    """Element (i_0, i_1, ...) of the view is element `offset + sum over factors of index * stride` of the base."""

    axes: tuple[Axis, ...]
    offset: int = 0

    @staticmethod
    def contiguous(shape: Sequence[int]) -> View:
        """The base itself."""
        axes, stride = [], 1
        for extent in reversed(shape):
            axes.append(((extent, stride),))
            stride *= extent
        return View(tuple(reversed(axes)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(e for e, _ in axis) for axis in self.axes)

    def transpose(self, perm: Sequence[int]) -> View:
        return View(tuple(self.axes[p] for p in perm), self.offset)

    def reshape(self, shape: Sequence[int]) -> View | None:
        """Row-major reshape; None when an axis boundary would cut a factor unevenly."""
        if prod(shape) != prod(self.shape):
            return None
        factors = list(self.merged(0, len(self.axes)))
        axes: list[Axis] = []
        for extent in reversed(shape):
            axis: list[Factor] = []
            need = extent
            while need > 1:
                have, stride = factors.pop()
                if need % have == 0:
                    axis.insert(0, (have, stride))
                    need //= have
                elif have % need == 0:
                    axis.insert(0, (need, stride))
                    factors.append((have // need, stride * need))
                    need = 1
                else:
                    return None
            axes.insert(0, tuple(axis) or ((1, 0),))
        return View(tuple(axes), self.offset)

    def expand(self, shape: Sequence[int]) -> View | None:
        """Broadcast to `shape` (right-aligned)."""
        own = self.shape
        if len(own) > len(shape):
            return None
        axes: list[Axis] = [((extent, 0),) for extent in shape]
        for i, axis in enumerate(self.axes):
            at = len(shape) - len(own) + i
            if own[i] == shape[at]:
                axes[at] = axis
            elif own[i] != 1:
                return None
        return View(tuple(axes), self.offset)

    def slice(self, axis: int, start: int, extent: int, step: int = 1) -> View | None:
        """Elements start, start + step, ... of one axis."""
        whole = self.shape[axis]
        if extent == whole and step == 1:
            return self
        reduced = reduce_axis(self.axes[axis])
        if extent == 1:
            offset, rest = self.offset, start
            for size, stride in reversed(reduced):
                offset += (rest % size) * stride
                rest //= size
            return View(_replaced(self.axes, axis, ((1, 0),)), offset)
        if len(reduced) == 1:
            ((_, stride),) = reduced
            return View(_replaced(self.axes, axis, ((extent, stride * step),)), self.offset + start * stride)
        inner = prod(e for e, _ in reduced[1:])
        if step == 1 and start % inner == 0 and extent % inner == 0:
            head = (extent // inner, reduced[0][1])
            return View(_replaced(self.axes, axis, (head, *reduced[1:])), self.offset + start // inner * reduced[0][1])
        return None

    def reduced(self) -> tuple[tuple[Axis, ...], int]:
        """A normal form: equal for equal maps."""
        return tuple(reduce_axis(a) for a in self.axes), self.offset

    def merged(self, first: int, last: int) -> Axis:
        """Axes first..last-1 read as one row-major axis, reduced."""
        return reduce_axis(tuple(f for axis in self.axes[first:last] for f in axis))


def reduce_axis(axis: Axis) -> Axis:
    """Drops factors of extent 1 and joins neighbours that step evenly (also two broadcast ones)."""
    out: list[Factor] = []
    for extent, stride in axis:
        if extent == 1:
            continue
        if out and out[-1][1] == extent * stride:
            out[-1] = (out[-1][0] * extent, stride)
        else:
            out.append((extent, stride))
    return tuple(out)


def _replaced(axes: tuple[Axis, ...], index: int, axis: Axis) -> tuple[Axis, ...]:
    return (*axes[:index], axis, *axes[index + 1 :])
