"""Which masks and shapes are measured. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Case:
    """One line of the results: mask name (a key of masks.MASKS) and shape."""

    mask: str
    batch: int
    heads: int
    seq: int
    dim: int
    kv_heads: int = 0  # 0: as many as heads
    dtype: str = "float16"

    @property
    def key(self) -> str:
        """Identifies the case in the results and on the command line."""
        return f"{self.mask}-{self.batch}x{self.heads}x{self.seq}x{self.dim}-{self.kv_heads or self.heads}-{self.dtype}"


def _cases(shapes: list[tuple[int, int, int, int]], masks: tuple[str, ...]) -> list[Case]:
    return [Case(m, b, h, s, d) for (b, h, s, d), m in product(shapes, masks)]


ANCHORS = [
    *_cases([(16, 12, 512, 64)], ("causal", "window", "bigbird")),
    *_cases([(8, 12, 1024, 64)], ("causal", "window", "longformer", "random")),
    *_cases([(16, 12, 2048, 64)], ("causal", "bigbird")),
    *_cases([(1, 16, 4096, 128)], ("causal", "window", "bigbird")),
    *_cases([(16, 12, 4096, 64)], ("causal", "window", "causal_window", "longformer", "bigbird", "random")),
    *_cases([(1, 16, 16384, 128)], ("causal", "bigbird", "random")),
]
PAPER = [
    Case(m, b, 12, s, 64)
    for s, b, m in product(
        (128, 256, 512, 1024, 2048, 4096), (1, 8, 16), ("causal", "paper_window", "paper_longformer", "paper_bigbird")
    )
]
LONG = [
    *_cases([(1, 12, 8192, 64), (1, 12, 16384, 64)], ("causal", "window", "longformer", "bigbird")),
    *_cases([(1, 12, 65536, 64), (1, 12, 131072, 64)], ("window512", "bigbird")),
]
SETS: dict[str, list[Case]] = {"anchors": ANCHORS, "paper": PAPER, "long": LONG}
