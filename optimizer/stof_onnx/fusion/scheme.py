"""Fusion schemes: one bit an operator of a block; a run of equal bits is a segment.

The complement of a scheme means the same segments. The canonical one begins with 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import Block

Span = tuple[int, int]


@dataclass(frozen=True)
class Scheme:
    """The bits of one block, canonical."""

    bits: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(bit not in (0, 1) for bit in self.bits):
            raise ValueError(f"a scheme holds zeros and ones only, not {self.bits}")
        if self.bits[:1] == (1,):
            object.__setattr__(self, "bits", tuple(1 - bit for bit in self.bits))

    @classmethod
    def encode(cls, spans: Sequence[Span]) -> Scheme:
        """The scheme whose segments are `spans` (start, stop), which follow each other from 0 on without gaps.

        Raises:
            ValueError: they do not.
        """
        bits: list[int] = []
        for number, (start, stop) in enumerate(spans):
            if start != len(bits) or stop <= start:
                raise ValueError(f"segment {start}..{stop} does not follow the one before it")
            bits += [number % 2] * (stop - start)
        return cls(tuple(bits))

    @classmethod
    def of_regions(cls, regions: Iterable[Span], length: int) -> Scheme:
        """The scheme of these segments, with one-operator segments between them.

        Raises:
            ValueError: they overlap or leave the block.
        """
        spans: list[Span] = []
        at = 0
        for start, stop in [*sorted(regions), (length, length)]:
            if start < at or stop > length:
                raise ValueError(f"segment {start}..{stop} overlaps another one or leaves the block")
            spans += [(i, i + 1) for i in range(at, start)]
            spans += [(start, stop)] * (stop > start)
            at = stop
        return cls.encode(spans)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The segments as (start, stop), in order."""
        found, at = [], 0
        for _, run in groupby(self.bits):
            length = len(list(run))
            found.append((at, at + length))
            at += length
        return tuple(found)

    def segments(self, block: Block) -> list[Segment]:
        """The segments of `block`.

        Raises:
            ValueError: the scheme is of a block of another length.
        """
        if len(self.bits) != len(block):
            raise ValueError(f"a scheme of {len(self.bits)} operators for a block of {len(block)}")
        return [Segment(block, *span) for span in self.spans]

    def text(self) -> str:
        """The bits as digits, as plans store them."""
        return "".join(map(str, self.bits))

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Reads `text`.

        Raises:
            ValueError: something else than zeros and ones.
        """
        if set(text) - {"0", "1"}:
            raise ValueError(f"not a scheme: {text!r}")
        return cls(tuple(map(int, text)))
