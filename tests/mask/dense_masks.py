"""Random dense masks for property tests, and the format's definition spelled out element by element."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

KINDS = ("random", "blocks", "causal", "window", "all", "none", "empty rows")
tile_sizes = st.integers(1, 12).map(lambda n: 8 * n)


def dense(kind: str, s_q: int, s_kv: int, rng: np.random.Generator) -> np.ndarray:
    q, k = np.arange(s_q)[:, None], np.arange(s_kv)[None, :]
    if kind == "random":
        return rng.random((s_q, s_kv)) < rng.choice([0.003, 0.1, 0.5, 0.98])
    if kind == "blocks":
        size_q, size_k = rng.integers(1, 33, 2)
        blocks = rng.random((s_q // size_q + 1, s_kv // size_k + 1)) < 0.5
        return blocks[q // size_q, k // size_k]
    if kind == "causal":
        return k <= q + rng.integers(0, 5)
    if kind == "window":
        return np.abs(q - k) <= rng.integers(0, 40)
    if kind == "empty rows":
        return (rng.random((s_q, s_kv)) < 0.5) & (rng.random((s_q, 1)) < 0.5)
    return np.full((s_q, s_kv), kind == "all")


@st.composite
def matrices(draw, max_size: int = 150):
    """bool [S_q, S_kv], ragged sizes included."""
    s_q, s_kv = draw(st.integers(1, max_size)), draw(st.integers(1, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return dense(draw(st.sampled_from(KINDS)), s_q, s_kv, rng)


@st.composite
def tables(draw, max_size: int = 100):
    """bool [B, H, S_q, S_kv] in which heads and batch entries may share masks."""
    s_q, s_kv = draw(st.integers(1, max_size)), draw(st.integers(1, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    distinct = np.stack([dense(kind, s_q, s_kv, rng) for kind in kinds])
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return distinct[rng.integers(0, len(kinds), shape)]


def tile_kinds(allowed: np.ndarray, tile_m: int, tile_n: int) -> np.ndarray:
    """ "empty", "full" or "part" for every tile, by looking at its elements in range."""
    rows, cols = -(-allowed.shape[0] // tile_m), -(-allowed.shape[1] // tile_n)
    kinds = np.empty((rows, cols), "U5")
    for i, j in product(range(rows), range(cols)):
        tile = allowed[i * tile_m : (i + 1) * tile_m, j * tile_n : (j + 1) * tile_n]
        kinds[i, j] = "empty" if not tile.any() else "full" if tile.all() else "part"
    return kinds


def tile_bitmap(allowed: np.ndarray, i: int, j: int, tile_m: int, tile_n: int) -> list[list[int]]:
    """The words of tile (i, j) as Python ints, bit by bit."""
    words = [[0] * (tile_n // 8) for _ in range(tile_m // 8)]
    for r, c in product(range(tile_m), range(tile_n)):
        q, k = i * tile_m + r, j * tile_n + c
        if q < allowed.shape[0] and k < allowed.shape[1] and allowed[q, k]:
            words[r // 8][c // 8] |= 1 << (8 * (r % 8) + c % 8)
    return words
