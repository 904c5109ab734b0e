"""What a block takes under a choice of regions: the regions' times and those of the pieces that TensorRT keeps.

Each run of operators outside regions is a piece, timed as TensorRT compiles it by itself, which is what it does
between two plugins. So a region competes with the very operators it takes *and* with what its neighbours lose when
it splits them off. (Cutting pieces ahead of each GEMM would need fewer engines, but TensorRT 8.6 took 1024 us on an
H200 for the four pieces of an encoder layer, and 785 to 813 for the layer in one piece.) Pieces without any
operator that could be in a region are the same in every choice and count nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from stof_onnx.fusion.scheme import Scheme, Span
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.timer import Region, Request
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import Block
from stof_onnx.fusion.templates import Instance, recognise

_LONGEST = 24  # operators of a segment that are looked at: the longest spelling of any template has fewer

_MOVES = frozenset({"Reshape", "Cast", "Identity"})
Choice = Mapping[Span, Region]


class BlockSpace:
    """One block, the regions that are possible in it, and what choices of them take."""

    def __init__(self, block: Block, ledger: Ledger, count: int = 1) -> None:
        self.block, self.ledger, self.count = block, ledger, count
        self.timed: set[Span] = set()  # pieces that were asked for
        self._segments: dict[Span, Segment] = {}

    @cached_property
    def regions(self) -> dict[Span, Region]:
        """Every possible region that some compiled kernel runs."""
        found = regions_of(self.block)
        return {span: region for span, region in found.items() if self.ledger.configs(region)}

    @cached_property
    def fusible(self) -> frozenset[int]:
        """Positions that some region could take."""
        return frozenset(i for start, stop in self.regions for i in range(start, stop))

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Where GEMMs begin, with the moves that feed them; not a second one of an input."""
        found, sources = [], set[str]()
        for i, operator in enumerate(self.block.operators):
            if operator.gemm:
                at = i
                while at and self.block.operators[at - 1].op in _MOVES:
                    at -= 1
                if operator.node.input[0] not in sources:
                    found.append(at)
                sources.add(operator.node.input[0])
        return tuple(found)

    def pieces(self, choice: Iterable[Span]) -> list[Span]:
        """What the regions of `choice` leave to TensorRT."""
        found: list[Span] = []
        at = 0
        for start, stop in [*sorted(choice), (len(self.block), len(self.block))]:
            if start > at:
                found.append((at, start))
            at = stop
        return found

    def total(self, choice: Choice) -> float:
        """Microseconds of the block, at the best configurations so far.

        Raises:
            BudgetSpent: a piece was not timed yet, and there is no time for it.
        """
        fused = sum(self.ledger.best(region)[0] for region in choice.values())
        return fused + sum(self.piece_us(piece) for piece in self.pieces(choice))

    def known(self, choice: Choice) -> float:
        """`total` from what has been timed; infinite where something has not."""
        fused = sum(self.ledger.best(region)[0] for region in choice.values())
        return fused + sum(self.known_piece(piece) for piece in self.pieces(choice))

    def piece_us(self, piece: Span) -> float:
        """Microseconds of a piece; 0 where nothing in it could be in a region."""
        if not self.matters(piece):
            return 0.0
        us = self.ledger.left(self.segment(piece))
        self.timed.add(piece)
        return us

    def known_piece(self, piece: Span) -> float:
        """`piece_us` where the piece has been timed, else infinite."""
        known = self.ledger.known_left(self.segment(piece)) if self.matters(piece) else 0.0
        return float("inf") if known is None else known

    def requests(self, choice: Choice) -> list[Request]:
        """What has to be timed to know `total`: of regions without a time the most promising configuration."""
        new = [region for region in choice.values() if not self.ledger.best(region)[1]]
        regions: list[Request] = [(region, self.ledger.configs(region)[0]) for region in new]
        return regions + [self.segment(piece) for piece in self.pieces(choice) if self.matters(piece)]

    def matters(self, piece: Span) -> bool:
        """Whether something in a piece could be in a region."""
        return not self.fusible.isdisjoint(range(*piece))

    def segment(self, span: Span) -> Segment:
        """The operators of a span; the same object each time."""
        if span not in self._segments:
            self._segments[span] = Segment(self.block, *span)
        return self._segments[span]

    def scheme(self, choice: Iterable[Span]) -> Scheme:
        """The bits: regions and pieces are the segments."""
        chosen = list(choice)
        return Scheme.encode(sorted([*chosen, *self.pieces(chosen)]))


def regions_of(block: Block) -> dict[Span, Region]:
    """Every segment of a block that a template computes, compiled or not.

    Of chains only those that no other region without a GEMM contains, and what GEMM regions leave of them.
    """
    found: dict[Span, Region] = {}
    for start in range(len(block)):
        for stop in range(start + 1, min(len(block), start + _LONGEST) + 1):
            segment = Segment(block, start, stop)
            instance = recognise(segment)
            if isinstance(instance, Instance) and instance.worth_it:
                found[start, stop] = Region(segment, instance)
    behind = {span[1] for span, region in found.items() if region.instance.gemms}
    rows = [span for span, region in found.items() if not region.instance.gemms]

    def stays(span: Span) -> bool:
        if found[span].instance.template != "chain":
            return True
        around = [s for s in rows if s != span and s[0] <= span[0] and s[1] >= span[1]]
        return not any(span[0] not in behind or s[1] > span[1] for s in around)

    return {span: region for span, region in found.items() if stays(span)}
