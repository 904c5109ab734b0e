"""Benchmark masks as one predicate each, so that every side runs the same mask.

A predicate takes integer query and key positions (numpy or torch, broadcastable) and returns booleans. FlexAttention
traces it, and the dense mask, the block mask and our encoding are all computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from stof_onnx.mask import RowBands
from stof_onnx.mask.sources import window as window_rows


@dataclass(frozen=True)
class BenchMask:
    """`allowed(q, k)`, and the parameters that peers with a native version of the mask want."""

    name: str
    allowed: Callable[[Any, Any], Any]
    causal: bool = False  # exactly q >= k
    window: tuple[int, int] | None = None  # exactly -left <= k - q <= right
    table: np.ndarray | None = field(default=None, repr=False)  # what `allowed` looks up: [S, S] or [S/block, S/block]
    block: int = 1

    near: int = 0  # exactly |q - k| <= near or q < near or k < near

    def bands(self, s: int) -> RowBands:
        """The rows of the [s, s] mask by bands, bool: what `allowed` says, streamed."""
        if self.table is not None:
            table, block = self.table, self.block

            def look_up(q0: int, q1: int) -> np.ndarray:
                blocks = table[q0 // block : -(-q1 // block)]
                return np.repeat(blocks, block, axis=1)[np.arange(q0, q1) // block - q0 // block, :s]

            return look_up if block > 1 else lambda q0, q1: table[q0:q1]
        if self.causal or self.window or self.near:
            left, right = (s, 0) if self.causal else self.window or (self.near, self.near)
            rows, first = window_rows(s, s, left, right), self.near

            def band(q0: int, q1: int) -> np.ndarray:
                out = rows(q0, q1)
                out[:, :first] = True
                out[: max(0, first - q0)] = True
                return out

            return band
        keys = np.arange(s)[None]
        return lambda q0, q1: np.asarray(self.allowed(np.arange(q0, q1)[:, None], keys))

    def on(self, device: Any) -> Callable[[Any, Any], Any]:
        """The predicate with its table, if it has one, as a torch tensor on `device`."""
        if self.table is None:
            return self.allowed
        import torch

        table, block = torch.from_numpy(self.table).to(device), self.block
        if block == 1:
            return lambda q, k: table[q, k]
        return lambda q, k: table[q // block, k // block]


def width(s: int) -> int:
    """Window half-width of the tables in docs/benchmarks.md: max(32, floor(sqrt(S)))."""
    return max(32, math.isqrt(s))


def causal(s: int) -> BenchMask:
    return BenchMask("causal", lambda q, k: q >= k, causal=True)


def window(s: int, w: int | None = None) -> BenchMask:
    w = width(s) if w is None else w
    return BenchMask(f"window{w}", lambda q, k: abs(q - k) <= w, window=(w, w))


def causal_window(s: int, w: int = 256) -> BenchMask:
    return BenchMask(f"causal_window{w}", lambda q, k: (q >= k) & (q - k <= w), window=(w, 0))


def longformer(s: int, w: int | None = None) -> BenchMask:
    w = width(s) if w is None else w
    return BenchMask(f"longformer{w}", lambda q, k: (abs(q - k) <= w) | (k < w) | (q < w), near=w)


def block_diagonal(s: int, doc: int = 512) -> BenchMask:
    return BenchMask(f"block_diagonal{doc}", lambda q, k: q // doc == k // doc)


def bigbird(s: int, block: int = 64, random_blocks: int = 3, seed: int = 0) -> BenchMask:
    """Blocks: neighbours +-1, first and last block row and column, `random_blocks` random blocks a row."""
    n = -(-s // block)
    i = np.arange(n)
    table = abs(i[:, None] - i[None]) <= 1
    table[0] = table[-1] = True
    table[:, 0] = table[:, -1] = True
    rng = np.random.default_rng(seed)
    for r in range(n):
        table[r, rng.permutation(n)[:random_blocks]] = True
    return BenchMask(f"bigbird{block}", lambda q, k: table[q // block, k // block], table=table, block=block)


def random(s: int, density: float = 0.1, seed: int = 1) -> BenchMask:
    table = np.random.default_rng(seed).random((s, s), dtype=np.float32) < density
    np.fill_diagonal(table, True)
    return BenchMask(f"random{density:g}", lambda q, k: table[q, k], table=table)


def paper_bigbird(s: int, fill: float = 0.1, seed: int = 2) -> BenchMask:
    """The paper's BigBird: window and global width sqrt(S), plus `fill` of all elements at random."""
    w = math.isqrt(s)
    i = np.arange(s)
    table = np.random.default_rng(seed).random((s, s), dtype=np.float32) < fill
    table |= (abs(i[:, None] - i[None]) <= w) | (i[None] < w) | (i[:, None] < w)
    return BenchMask("paper_bigbird", lambda q, k: table[q, k], table=table)


def paper_window(s: int) -> BenchMask:
    return window(s, math.isqrt(s))


def paper_longformer(s: int) -> BenchMask:
    return longformer(s, math.isqrt(s))


MASKS: dict[str, Callable[[int], BenchMask]] = {
    "causal": causal,
    "window": window,
    "window512": lambda s: window(s, 512),
    "causal_window": causal_window,
    "longformer": longformer,
    "block_diagonal": block_diagonal,
    "bigbird": bigbird,
    "random": random,
    "paper_window": paper_window,
    "paper_longformer": paper_longformer,
    "paper_bigbird": paper_bigbird,
}
