"""The mask zoo: every mask is a rule `allowed(q, k)` that can be evaluated for any band of rows.

A `MaskSpec` is plain data (it travels as JSON beside an exported model); `rows` evaluates it for queries [q0, q1),
`dense` for all of them. numpy only, and never more memory than the band asked for. Definitions, with w the width:

    none           every key
    causal         k <= q                              (upper-left alignment, also where S_q != S_kv)
    causal-br      k <= q + S_kv - S_q                 (bottom-right alignment)
    window         |q - k| <= w
    causal-window  0 <= q - k <= w
    dilated        |q - k| <= w * d and (q - k) % d == 0
    longformer     window, plus the first g rows and columns
    bigbird        blocks of b: neighbours +-1, first and last block row and column, r random blocks a row
    block-diagonal q and k lie in the same packed segment
    prefix-lm      k <= q or k < prefix
    random         each element with probability p (a hash of seed, q, k), plus the diagonal
    per-head       head h takes entry h % 4 of: window, dilated, longformer, random

`causal=True` intersects any of them with `k <= q`: that is how they are put into a decoder. `band` intersects with a
window or causal window of an architecture's local layers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

KINDS = (
    "none",
    "causal",
    "causal-br",
    "window",
    "causal-window",
    "dilated",
    "longformer",
    "bigbird",
    "block-diagonal",
    "prefix-lm",
    "random",
    "per-head",
)
PER_HEAD_KINDS = ("window", "dilated", "longformer", "random")
# A smaller one is the leading submatrix of a larger one with the same parameters.
PREFIX_STABLE = frozenset(KINDS) - {"causal-br", "bigbird"}


@dataclass(frozen=True)
class MaskSpec:
    """One static mask of S_q x S_kv, or of `heads` such masks when `kind` is per-head."""

    kind: str
    seq_q: int
    seq_kv: int
    heads: int = 1
    causal: bool = False
    width: int = 0
    dilation: int = 1
    global_tokens: int = 0
    block: int = 0
    random_blocks: int = 0
    prefix: int = 0
    density: float = 0.0
    segments: tuple[int, ...] = ()
    band: str = ""  # "", "window" or "causal-window": an architecture's local layers
    band_width: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown mask {self.kind!r}; known masks: {', '.join(KINDS)}")
        if self.seq_q < 1 or self.seq_kv < 1:
            raise ValueError(f"a mask needs at least one row and one column, got {self.seq_q} x {self.seq_kv}")

    @property
    def per_head(self) -> bool:
        return self.kind == "per-head"

    def rows(self, q0: int, q1: int) -> np.ndarray:
        """Rows [q0, q1): bool [q1 - q0, S_kv], or [heads, q1 - q0, S_kv] for per-head masks."""
        if not 0 <= q0 <= q1 <= self.seq_q:
            raise ValueError(f"rows [{q0}, {q1}) are not inside [0, {self.seq_q})")
        q = np.arange(q0, q1, dtype=np.int64)[:, None]
        k = np.arange(self.seq_kv, dtype=np.int64)[None, :]
        if self.per_head:
            distinct = [self._head(h)._allowed(q, k) for h in range(min(self.heads, len(PER_HEAD_KINDS)))]
            allowed = np.stack([distinct[h % len(distinct)] for h in range(self.heads)])
        else:
            allowed = self._allowed(q, k)
        if self.causal:
            allowed = allowed & (k <= q)
        if self.band == "window":
            allowed = allowed & (np.abs(q - k) <= self.band_width)
        elif self.band == "causal-window":
            allowed = allowed & (k <= q) & (q - k <= self.band_width)
        return allowed

    def dense(self, seq_q: int | None = None, seq_kv: int | None = None) -> np.ndarray:
        """The whole mask, or its leading seq_q x seq_kv submatrix: bool [S_q, S_kv] or [heads, S_q, S_kv]."""
        seq_q = self.seq_q if seq_q is None else seq_q
        seq_kv = self.seq_kv if seq_kv is None else seq_kv
        return self.rows(0, seq_q)[..., :seq_kv]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields; defaults are left out."""
        default = MaskSpec(self.kind, self.seq_q, self.seq_kv)
        keep = {"kind", "seq_q", "seq_kv"}
        return {n: v for n, v in asdict(self).items() if n in keep or v != getattr(default, n)}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> MaskSpec:
        fields = dict(fields)
        fields["segments"] = tuple(fields.get("segments", ()))
        return MaskSpec(**fields)

    def _head(self, head: int) -> MaskSpec:
        return replace(self, kind=PER_HEAD_KINDS[head % len(PER_HEAD_KINDS)], causal=False, band="")

    def _allowed(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        if self.kind == "none":
            return np.ones((q.shape[0], k.shape[1]), bool)
        if self.kind == "causal":
            return k <= q
        if self.kind == "causal-br":
            return k <= q + (self.seq_kv - self.seq_q)
        if self.kind == "window":
            return np.abs(q - k) <= self.width
        if self.kind == "causal-window":
            return (k <= q) & (q - k <= self.width)
        if self.kind == "dilated":
            return (np.abs(q - k) <= self.width * self.dilation) & ((q - k) % self.dilation == 0)
        if self.kind == "longformer":
            return (np.abs(q - k) <= self.width) | (q < self.global_tokens) | (k < self.global_tokens)
        if self.kind == "bigbird":
            return self._bigbird(q, k)
        if self.kind == "block-diagonal":
            ends = np.cumsum(self.segments)
            return np.searchsorted(ends, q, side="right") == np.searchsorted(ends, k, side="right")
        if self.kind == "prefix-lm":
            return (k <= q) | (k < self.prefix)
        return (
            _hash_uniform(q, k, self.seed) < self.density
            if self.density < 1
            else np.ones((q.shape[0], k.shape[1]), bool)
        )

    def _bigbird(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        block_q, block_k = q // self.block, k // self.block
        last_q, last_k = (self.seq_q - 1) // self.block, (self.seq_kv - 1) // self.block
        allowed = np.abs(block_q - block_k) <= 1
        allowed |= (block_q == 0) | (block_q == last_q) | (block_k == 0) | (block_k == last_k)
        for row in np.unique(block_q):
            picks = np.random.default_rng([self.seed, int(row)]).permutation(last_k + 1)[: self.random_blocks]
            allowed[(block_q == row)[:, 0]] |= np.isin(block_k, picks)
        return allowed


def make_mask(
    kind: str,
    seq_q: int,
    seq_kv: int | None = None,
    *,
    heads: int = 1,
    causal: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> MaskSpec:
    """A zoo mask with the usual parameters for its size; any field of `MaskSpec` can be overridden.

    Width max(32, sqrt(S)), BigBird blocks of 64 with 3 random blocks a row, 10 % random, but never so wide that a
    short sequence would be all allowed (width at most S/8, blocks at most S/8).
    """
    seq_kv = seq_q if seq_kv is None else seq_kv
    size = max(seq_q, seq_kv)
    width = max(1, min(max(32, math.isqrt(size)), size // 8))
    fields: dict[str, Any] = {}
    if kind in ("window", "causal-window", "dilated", "longformer", "per-head"):
        fields["width"] = width
    if kind in ("dilated", "per-head"):
        fields["dilation"] = 2
    if kind in ("longformer", "per-head"):
        fields["global_tokens"] = width
    if kind == "bigbird":
        fields.update(block=max(1, min(64, size // 8)), random_blocks=3)
    if kind == "block-diagonal":
        fields["segments"] = _segments(size, seed)
    if kind == "prefix-lm":
        fields["prefix"] = max(1, size // 4)
    if kind in ("random", "per-head"):
        fields["density"] = 0.1
    fields.update(overrides)
    return MaskSpec(kind, seq_q, seq_kv, heads=heads if kind == "per-head" else 1, causal=causal, seed=seed, **fields)


def _segments(size: int, seed: int) -> tuple[int, ...]:
    """Packed documents of size/16 .. size/4 tokens, drawn in order until `size` is covered."""
    rng = np.random.default_rng([seed, 1])
    lengths: list[int] = []
    while sum(lengths) < size:
        lengths.append(int(rng.integers(max(1, size // 16), max(2, size // 4))))
    return tuple(lengths)


def _hash_uniform(q: np.ndarray, k: np.ndarray, seed: int) -> np.ndarray:
    """Uniform [0, 1) numbers that depend on (seed, q, k) only (splitmix64), and 0 on the diagonal."""
    with np.errstate(over="ignore"):
        x = (q.astype(np.uint64) << np.uint64(32)) ^ k.astype(np.uint64)
        x = x + np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    uniform = (x >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return np.where(q == k, 0.0, uniform)
