"""Dynamic sequence lengths: encoded at the largest, valid for every shorter one, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from stof_onnx.attention.types import KvKind
from stof_onnx.mask import decode

from tests.attention.graphs import Graph, Sizes, Steps, attention, feeds, finish, heads_first
from tests.attention.reference import Found, check, find

DYNAMIC = Sizes(batch="batch", seq_q="seq", seq_kv="seq")
LOWEST = float(np.finfo(np.float32).min)


def shapes(low: int = 2, high: int = 24) -> tuple[str, ...]:
    return tuple(f"{n}:1x{low}x32:4x{high}x32" for n in "qkv")


def positions(g: Graph, like: str = "q") -> tuple[str, str]:
    """Row and column numbers [S, 1] and [1, S]."""
    length = g.add("Squeeze", g.add("Shape", like, start=1, end=2), g.ints(0))
    steps = g.add("Range", g.const(0, np.int64), length, g.const(1, np.int64))
    return g.add("Unsqueeze", steps, g.ints(1)), g.add("Unsqueeze", steps, g.ints(0))


def masked(g: Graph, x: str, seen: str) -> str:
    return g.add("Add", x, g.add("Where", seen, g.const(0.0), g.const(LOWEST)))


def search(terms: Steps, tmp_path, rng, given: tuple[str, ...] | None = None, lengths=(2, 7, 24)) -> Found:
    g = Graph()
    attention(g, DYNAMIC, terms)
    model = g.model()
    found = find(model, tmp_path, shapes() if given is None else given)
    for length in lengths:
        check(found, feeds(model, rng, batch=int(rng.integers(1, 4)), seq=length))
    return found


def test_causal_by_comparison(tmp_path, rng):
    def terms(g: Graph, x: str) -> str:
        rows, cols = positions(g)
        return masked(g, x, g.add("LessOrEqual", cols, rows))

    match = search(terms, tmp_path, rng).only
    assert match.dynamic_seq and match.seq_q == 24 and match.mask is not None
    np.testing.assert_array_equal(np.squeeze(decode(match.mask)), np.tril(np.ones((24, 24), bool)))


def test_causal_by_triangle(tmp_path, rng):
    """TorchScript's is_causal: Trilu of ones, Equal, Where."""

    def terms(g: Graph, x: str) -> str:
        length = g.add("Shape", "q", start=1, end=2)
        ones = g.add("Expand", g.const(1.0), g.add("Concat", length, length, axis=0))
        zero = g.add("Equal", g.add("Trilu", ones, upper=0), g.const(0.0))
        return g.add("Add", x, g.add("Where", zero, g.const(-np.inf), g.const(0.0)))

    assert search(terms, tmp_path, rng).only.mask is not None


def test_table_cut_to_length(tmp_path, rng):
    """A causal buffer of the largest size, sliced."""
    table = np.tril(np.ones((1, 1, 64, 64), bool))

    def terms(g: Graph, x: str) -> str:
        length = g.add("Shape", "q", start=1, end=2)
        cut = g.add("Slice", g.const(table), g.ints(0), length, g.ints(2))
        cut = g.add("Slice", cut, g.ints(0), length, g.ints(3))
        return g.add("Where", cut, x, g.const(-np.inf))

    assert search(terms, tmp_path, rng).only.mask is not None


def test_relative_bias_of_dynamic_length(tmp_path, rng):
    table = rng.standard_normal((9, 4)).astype(np.float32)

    def terms(g: Graph, x: str) -> str:
        rows, cols = positions(g)
        distance = g.add("Min", g.add("Abs", g.add("Sub", cols, rows)), g.const(8, np.int64))
        bias = g.add("Transpose", g.add("Gather", g.const(table), distance), perm=[2, 0, 1])
        return g.add("Add", x, g.add("Unsqueeze", bias, g.ints(0)))

    match = search(terms, tmp_path, rng).only
    assert match.bias.rel_rq == 24 and match.bias.array is not None and match.bias.array.shape == (4, 47)


def test_table_cut_from_its_end_is_refused(tmp_path):
    """Bottom-right alignment: row q of a shorter sequence is another row of the table."""
    table = np.tril(np.ones((1, 1, 24, 24), bool), -2) | np.eye(24, dtype=bool)
    table[..., 0] = True
    table[0, 0, 20, 3] = False

    def terms(g: Graph, x: str) -> str:
        length = g.add("Shape", "q", start=1, end=2)
        start = g.add("Sub", g.ints(24), length)
        cut = g.add("Slice", g.const(table), start, g.ints(24), g.ints(2))
        cut = g.add("Slice", cut, g.ints(0), length, g.ints(3))
        return g.add("Where", cut, x, g.const(-1e9))

    g = Graph()
    attention(g, DYNAMIC, terms)
    refusal = find(g.model(), tmp_path, shapes()).refused
    assert "leading part" in refusal.reason


def test_last_rows_see_everything_is_refused(tmp_path):
    """BigBird's last block: rows counted from the end."""

    def terms(g: Graph, x: str) -> str:
        rows, cols = positions(g)
        last = g.add("Sub", g.add("Shape", "q", start=1, end=2), g.ints(2))
        seen = g.add("Or", g.add("LessOrEqual", cols, rows), g.add("GreaterOrEqual", rows, last))
        return masked(g, x, seen)

    g = Graph()
    attention(g, DYNAMIC, terms)
    assert "leading part" in find(g.model(), tmp_path, shapes()).refused.reason


def test_few_lengths_are_all_tried(tmp_path, rng):
    """Not prefix-stable by construction (it reads S), yet the same at every length that can occur."""

    def terms(g: Graph, x: str) -> str:
        rows, cols = positions(g)
        far = g.add("Mul", g.add("Shape", "q", start=1, end=2), g.add("Shape", "q", start=1, end=2))
        seen = g.add("And", g.add("LessOrEqual", cols, rows), g.add("Less", g.add("Sub", rows, cols), far))
        return masked(g, x, seen)

    assert search(terms, tmp_path, rng).only.mask is not None


def test_many_lengths_that_can_not_be_proven_are_refused(tmp_path):
    def terms(g: Graph, x: str) -> str:
        rows, cols = positions(g)
        far = g.add("Mul", g.add("Shape", "q", start=1, end=2), g.add("Shape", "q", start=1, end=2))
        seen = g.add("And", g.add("LessOrEqual", cols, rows), g.add("Less", g.add("Sub", rows, cols), far))
        return masked(g, x, seen)

    g = Graph()
    attention(g, DYNAMIC, terms)
    refusal = find(g.model(), tmp_path, shapes(2, 3000)).refused
    assert "leading part" in refusal.reason and refusal.nodes


def test_a_difference_of_equal_sizes_is_constant(tmp_path, rng):
    """S_kv - S_q is 0 at every length: bottom-right alignment of a square mask."""

    def terms(g: Graph, x: str) -> str:
        rows, cols = positions(g)
        offset = g.add("Sub", g.add("Shape", "k", start=1, end=2), g.add("Shape", "q", start=1, end=2))
        return masked(g, x, g.add("LessOrEqual", cols, g.add("Add", rows, offset)))

    assert search(terms, tmp_path, rng).only.mask is not None


def test_a_mask_without_bound_asks_for_the_range(tmp_path):
    def terms(g: Graph, x: str) -> str:
        rows, cols = positions(g)
        return masked(g, x, g.add("LessOrEqual", cols, rows))

    g = Graph()
    attention(g, DYNAMIC, terms)
    assert "--shape" in find(g.model(), tmp_path).refused.reason


def test_padding_without_bound(tmp_path, rng):
    """No static part, so nothing has to be encoded; an all-true test of positions does not change that."""
    g = Graph()
    pad = g.input("pad", ["batch", "seq"], np.int64)

    def terms(g: Graph, x: str) -> str:
        rows, _ = positions(g)
        always = g.add("GreaterOrEqual", rows, g.const(0, np.int64))
        seen = g.add("And", always, g.add("Unsqueeze", g.add("Cast", pad, to=9), g.ints(1, 2)))
        return masked(g, x, seen)

    attention(g, DYNAMIC, terms)
    model = g.model()
    found = find(model, tmp_path)
    match = found.only
    assert match.mask is None and match.kv_mask.kind is KvKind.MASK and match.seq_q == 0
    check(found, feeds(model, rng, batch=3, seq=50))


@pytest.mark.parametrize("batches", ["1:2", "1:4", "2:3", "3:4"])
@pytest.mark.parametrize("same", [True, False])
def test_masks_of_batch_entries_need_a_fixed_batch(same, batches, tmp_path):
    """A [4, 1, S, S] table serves a batch of 4 only; equal entries need no table."""
    table = np.tril(np.ones((4, 1, 9, 9), bool))
    if not same:
        table[1, 0, 5, 2] = False

    def terms(g: Graph, x: str) -> str:
        rows = g.add("Slice", g.const(table), g.ints(0), g.add("Shape", "q", start=0, end=1), g.ints(0))
        return g.add("Where", rows, x, g.const(-1e9))

    g = Graph()
    attention(g, Sizes(batch="batch"), terms)
    low, high = batches.split(":")
    found = find(g.model(), tmp_path, tuple(f"{n}:{low}x9x32:{high}x9x32" for n in "qkv"))
    if same:
        assert found.only.mask is not None
    else:
        assert "differs between batch entries" in found.refused.reason


def test_static_axes_beside_a_dynamic_batch(tmp_path, rng):
    g = Graph()
    keep = rng.random((9, 9)) < 0.5
    keep[:, 0] = True
    attention(g, Sizes(batch="batch"), lambda g, x: g.add("Where", g.const(keep), x, g.const(-1e9)))
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.mask is not None and not found.only.dynamic_seq
    check(found, feeds(model, rng, batch=5))


@pytest.mark.parametrize("ranges", [("2x24", "2x24"), ("2x24", "2x30")])
def test_axes_of_different_names_are_different(ranges, tmp_path):
    """Bottom-right alignment is constant only where S_q = S_kv; two axes with one range need not be equal."""

    def terms(g: Graph, x: str) -> str:
        rows, _ = positions(g, "q")
        _, cols = positions(g, "k")
        offset = g.add("Sub", g.add("Shape", "k", start=1, end=2), g.add("Shape", "q", start=1, end=2))
        return masked(g, x, g.add("LessOrEqual", cols, g.add("Add", rows, offset)))

    g = Graph()
    attention(g, Sizes(batch="batch", seq_q="targets", seq_kv="sources"), terms)
    (low, high), (low_kv, high_kv) = (r.split("x") for r in ranges)
    given = (f"q:1x{low}x32:4x{high}x32", f"k:1x{low_kv}x32:4x{high_kv}x32", f"v:1x{low_kv}x32:4x{high_kv}x32")
    assert "leading part" in find(g.model(), tmp_path, given).refused.reason


def test_cross_attention_of_two_dynamic_lengths(tmp_path, rng):
    g = Graph()
    pad = g.input("pad", ["batch", "sources"], np.int64)

    def terms(g: Graph, x: str) -> str:
        return masked(g, x, g.add("Unsqueeze", g.add("Cast", pad, to=9), g.ints(1, 2)))

    attention(g, Sizes(batch="batch", seq_q="targets", seq_kv="sources"), terms)
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.kv_mask.kind is KvKind.MASK
    check(found, feeds(model, rng, batch=2, targets=5, sources=11))


def test_one_size_under_several_names(tmp_path, rng):
    """TorchScript names the axes of each input apart; shapes agree only where they are equal."""
    g = Graph()
    q = g.input("q", ["q_0", "q_1", 32])
    k, v = g.input("k", ["k_0", "k_1", 32]), g.input("v", ["v_0", "v_1", 32])
    same = g.add("Mul", g.add("Add", g.add("Add", q, k), v), g.const(0.0))
    qh, kh, vh = (heads_first(g, g.add("Add", x, same), 4, 8) for x in (q, k, v))
    x = g.add("MatMul", qh, g.add("Transpose", kh, perm=[0, 1, 3, 2]))
    rows, cols = positions(g)
    finish(g, DYNAMIC, masked(g, x, g.add("LessOrEqual", cols, rows)), vh)
    model = g.model()
    found = find(model, tmp_path, shapes())
    assert found.only.mask is not None and found.only.dynamic_seq
    sizes = {f"{n}_{i}": (3, 7)[i] for n in "qkv" for i in (0, 1)}
    check(found, feeds(model, rng, **sizes))


@pytest.mark.parametrize(("fill", "rows"), [(-np.inf, "nan"), (LOWEST, "mean")])
def test_rows_that_lose_their_keys_when_the_sequence_is_shorter(fill, rows, tmp_path, rng):
    """Query q sees the keys after it: the last one sees none, whatever the length."""

    def terms(g: Graph, x: str) -> str:
        rows, cols = positions(g)
        return g.add("Where", g.add("Greater", cols, rows), x, g.const(fill))

    assert search(terms, tmp_path, rng).only.masked_row.value == rows


def test_rows_that_lose_their_keys_only_at_some_lengths(tmp_path, rng):
    """Row 0 sees key 5 alone: at lengths up to 5 it sees none."""
    table = np.tril(np.ones((24, 24), bool))
    table[0, 0], table[0, 5] = False, True

    def terms(g: Graph, x: str) -> str:
        size = g.add("Shape", "q", start=1, end=2)
        seen = g.add("Slice", g.add("Slice", g.const(table), g.ints(0), size, g.ints(0)), g.ints(0), size, g.ints(1))
        return g.add("Where", seen, x, g.const(LOWEST))

    assert search(terms, tmp_path, rng, lengths=(2, 5, 6, 24)).only.masked_row.value == "mean"
