"""What choices of regions will take: times that are known, else what a guide predicts, corrected by what is known.

A guide's errors repeat: TensorRT is slower than the roofline wherever it takes several kernels, in every piece that has
the same operators. So a prediction is multiplied by how far the guide was off for the same template, and for pieces by
how far it was off for those that share operators with it. How much predictions are doubted comes from how much those
errors differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search.cost import BlockSpace, Choice
from stof_onnx.fusion.search.paths import best_choice
from stof_onnx.fusion.search.timer import Region, Timer

_LEAST_DOUBT, _MOST_DOUBT = 0.02, 0.1  # as shares of a prediction
_FEW = 3  # times by which predictions are not judged yet


class Forecast:
    """Predictions for one block.

    Args:
        guide: what predicts.

    Attributes:
        trust: halves the doubt each time that it is doubled.
    """

    def __init__(self, space: BlockSpace, guide: Timer) -> None:
        self.space, self.guide, self.trust = space, guide, 1.0
        self._regions: dict[Span, float] = {}  # the guide's own
        self._pieces: dict[Span, float] = {}

    @property
    def doubt(self) -> float:
        """Share of a prediction that it may be too high: choices are given that much credit."""
        errors: dict[str, list[float]] = {}
        for span, region in self.space.regions.items():
            known = self._known(region)
            if known is not None and known < float("inf") and self._predicted(span) > 0:
                errors.setdefault(region.instance.template, []).append(known / self._predicted(span))
        for piece, guess in self._timed().items():
            if guess > 0 and self.space.known_piece(piece) < float("inf"):
                errors.setdefault("", []).append(self.space.known_piece(piece) / guess)
        several = [ratios for ratios in errors.values() if len(ratios) > 1]
        off = [abs(ratio / (sum(ratios) / len(ratios)) - 1.0) for ratios in several for ratio in ratios]
        if len(off) < _FEW:
            return _MOST_DOUBT / self.trust
        return min(_MOST_DOUBT, max(_LEAST_DOUBT, 2 * sum(off) / len(off))) / self.trust

    def total(self, choice: Choice) -> float:
        """The least that a choice may take: what is known of it, and predictions less the doubt."""
        fused = sum(self.region(span) for span in choice)
        return fused + sum(self.piece(piece) for piece in self.space.pieces(choice))

    def best(self, least_gain: float) -> Choice:
        """The choice with the least `total`; a region has to gain `least_gain` microseconds."""
        regions = {span: self.region(span) + least_gain for span in self.space.regions}
        _, spans = best_choice(regions, self.piece, 0, len(self.space.block))
        return {span: self.space.regions[span] for span in spans}

    def region(self, span: Span) -> float:
        """As `total`, of one region."""
        region = self.space.regions[span]
        known = self._known(region)
        if known is not None:
            return known
        return (1.0 - self.doubt) * self._predicted(span) * self._correction(region)

    def piece(self, piece: Span) -> float:
        """As `total`, of a piece."""
        space = self.space
        if not space.matters(piece):
            return 0.0
        known = space.ledger.known_left(space.segment(piece))
        return known if known is not None else (1.0 - self.doubt) * self._left(piece) * self._overlap(piece)

    def _known(self, region: Region) -> float | None:
        us, config = self.space.ledger.best(region)
        return us if config else None

    def _predicted(self, span: Span) -> float:
        if span not in self._regions:
            region = self.space.regions[span]
            names = self.guide.configs(region)
            self._regions[span] = self.guide.fused(region, names[0]).us if names else 0.0
        return self._regions[span]

    def _left(self, piece: Span) -> float:
        if piece not in self._pieces:
            self._pieces[piece] = self.guide.left(self.space.segment(piece)).us
        return self._pieces[piece]

    def _correction(self, region: Region) -> float:
        """Of the regions of one template."""
        same = [s for s, r in self.space.regions.items() if r.instance.template == region.instance.template]
        known = ((1.0, self._known(self.space.regions[s]), self._predicted(s)) for s in same)
        return _ratio((weight, us, guess) for weight, us, guess in known if us is not None)

    def _overlap(self, piece: Span) -> float:
        """Of pieces, the more the larger the share of operators that they have in common."""
        known = ((_common(piece, s), self.space.known_piece(s), guess) for s, guess in self._timed().items())
        return _ratio((weight, us, guess) for weight, us, guess in known if us < float("inf"))

    def _timed(self) -> dict[Span, float]:
        """Predictions of the pieces that have a time."""
        for piece in self.space.timed:
            self._left(piece)
        return {piece: self._pieces[piece] for piece in self.space.timed}


def _common(a: Span, b: Span) -> float:
    both = min(a[1], b[1]) - max(a[0], b[0])
    return max(0, both) / (max(a[1], b[1]) - min(a[0], b[0]))


def _ratio(known: Iterable[tuple[float, float, float]]) -> float:
    """The mean of time over prediction by weight; 1 where there is none."""
    ratios = [(weight, us / guess) for weight, us, guess in known if weight > 0 and guess > 0 and us < float("inf")]
    total = sum(weight for weight, _ in ratios)
    return sum(weight * ratio for weight, ratio in ratios) / total if total else 1.0
