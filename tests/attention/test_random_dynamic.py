"""Random terms on dynamic lengths: whatever is matched has to be right at every length, whatever it was encoded at."""

from __future__ import annotations

import numpy as np
import pytest

from tests.attention.graphs import Graph, Sizes, attention, feeds
from tests.attention.reference import check, find

LOWEST = float(np.finfo(np.float32).min)
SIZES = Sizes(batch="batch", seq_q="seq", seq_kv="seq")
LONGEST = 20
GRAPHS = 25


def length(g: Graph, like: str = "q") -> str:
    return g.add("Shape", like, start=1, end=2)


def number(g: Graph, rng: np.random.Generator) -> str:
    """An offset: fixed, from a size, or a difference of equal sizes."""
    kind = int(rng.integers(4))
    fixed = g.ints(int(rng.integers(-2, 3)))
    if kind == 0:
        return g.add("Sub", length(g), g.ints(int(rng.integers(1, 4))))
    if kind == 1:
        return g.add("Add", g.add("Sub", length(g, "k"), length(g)), fixed)
    if kind == 2:
        return g.add("Sub", g.add("Mul", length(g), g.ints(2)), g.add("Add", length(g, "v"), length(g)))
    return fixed


def positions(g: Graph, rng: np.random.Generator) -> tuple[str, str]:
    end = g.add("Squeeze", length(g), g.ints(0))
    steps = g.add("Range", g.const(0, np.int64), end, g.const(1, np.int64))
    if rng.random() < 0.2:  # counted from the end
        steps = g.add("Sub", steps, end)
    return g.add("Unsqueeze", steps, g.ints(1)), g.add("Unsqueeze", steps, g.ints(0))


def cut(g: Graph, rng: np.random.Generator, table: str, axis: int) -> str:
    """The part of a table of the largest size, from its start or to its end."""
    size = length(g)
    if rng.random() < 0.7:
        return g.add("Slice", table, g.ints(0), size, g.ints(axis))
    if rng.random() < 0.5:
        return g.add("Slice", table, g.add("Neg", size), g.ints(2**40), g.ints(axis))
    return g.add("Slice", table, g.add("Sub", g.ints(LONGEST), size), g.ints(LONGEST), g.ints(axis))


def seen_by(g: Graph, rng: np.random.Generator, pad: str) -> str:
    """A bool mask that broadcasts to [B, H, S, S]."""
    kind = rng.choice(["compare", "row", "table", "triangle", "pad"])
    rows, cols = positions(g, rng)
    if kind == "compare":
        op = str(rng.choice(["LessOrEqual", "Less", "GreaterOrEqual"]))
        return g.add(op, cols, g.add("Add", rows, number(g, rng)))
    if kind == "row":
        return g.add(str(rng.choice(["GreaterOrEqual", "Less"])), rows if rng.random() < 0.5 else cols, number(g, rng))
    if kind == "table":
        table = rng.random((LONGEST, LONGEST)) < 0.7
        if rng.random() < 0.3:
            table = np.tril(np.ones((LONGEST, LONGEST), bool))
        return cut(g, rng, cut(g, rng, g.const(table), 0), 1)
    if kind == "triangle":
        ones = g.add("Expand", g.const(1.0), g.add("Concat", length(g), length(g, "k"), axis=0))
        return g.add("Greater", g.add("Trilu", ones, upper=0), g.const(0.5))
    return g.add("Unsqueeze", g.add("Cast", pad, to=9), g.ints(1, 2))


def random_term(g: Graph, rng: np.random.Generator, x: str, pad: str) -> str:
    seen = seen_by(g, rng, pad)
    if rng.random() < 0.4:
        seen = g.add(str(rng.choice(["And", "Or"])), seen, seen_by(g, rng, pad))
    fill = float(rng.choice([-np.inf, LOWEST, -1e4, -2.5]))
    if rng.random() < 0.5:
        return g.add("Where", seen, x, g.const(fill))
    return g.add("Add", x, g.add("Where", seen, g.const(0.0), g.const(fill)))


@pytest.mark.parametrize("part", range(4))
def test_what_is_matched_is_right_at_every_length(part, tmp_path, rng):
    matched = 0
    for _ in range(GRAPHS):
        g = Graph()
        pad = g.input("pad", ["batch", "seq"], np.int64)

        def terms(g: Graph, x: str, pad: str = pad) -> str:
            for _ in range(int(rng.integers(1, 3))):
                x = random_term(g, rng, x, pad)
            return x

        attention(g, SIZES, terms)
        g.output(g.add("Cast", pad, to=1))
        model = g.model()
        low = int(rng.integers(2, LONGEST))
        bounded = rng.random() < 0.8
        given = (*(f"{n}:1x{low}x32:4x{LONGEST}x32" for n in "qkv"), f"pad:1x{low}:4x{LONGEST}")
        found = find(model, tmp_path, given if bounded else ())
        assert len(found.matches) + len(found.refusals) == 1
        matched += len(found.matches)
        if found.matches:
            for size in {low, LONGEST, int(rng.integers(low, LONGEST + 1))}:
                inputs = feeds(model, rng, batch=int(rng.integers(1, 4)), seq=size)
                inputs["q"] *= 0.25
                check(found, inputs, rtol=3e-3, atol=3e-3)
                inputs["pad"][:] = rng.integers(0, 2, inputs["pad"].shape)
                check(found, inputs, rtol=3e-3, atol=3e-3)
    assert matched > 2
