"""Static masks, biases, constants that are masks or not, and rows that see no key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stof_onnx.attention.types import AttentionMatch, BiasKind, MaskedRow
from stof_onnx.mask import decode

from tests.attention.graphs import Graph, Sizes, Steps, attention, feeds
from tests.attention.reference import Found, check, find

LOWEST = float(np.finfo(np.float32).min)
CAUSAL = np.tril(np.ones((9, 9), bool))
PLAIN = Sizes()


def add(value: Any, dtype: Any = np.float32) -> Steps:
    return lambda g, x: g.add("Add", x, g.const(value, dtype))


def where(keep: np.ndarray, fill: float, dtype: Any = np.float32) -> Steps:
    return lambda g, x: g.add("Where", g.const(keep), x, g.const(fill, dtype))


def guard(g: Graph, x: str) -> str:
    return g.add("Where", g.add("IsNaN", x), g.const(0.0), x)


def both(*steps: Steps) -> Steps:
    def run(g: Graph, x: str) -> str:
        for step in steps:
            x = step(g, x)
        return x

    return run


def found_in(
    terms: Steps,
    tmp_path: Path,
    rng: np.random.Generator,
    s: Sizes = PLAIN,
    probabilities: Steps | None = None,
    tolerance: float = 0.0,
) -> Found:
    g = Graph()
    attention(g, s, terms, probabilities)
    model = g.model()
    found = find(model, tmp_path)
    tolerance = tolerance or (2e-5 if s.dtype is np.float32 else 5e-3)
    check(found, feeds(model, rng), rtol=tolerance, atol=tolerance)
    return found


def allowed(match: AttentionMatch) -> np.ndarray:
    assert match.mask is not None
    dense = decode(match.mask)
    if dense.ndim == 2:
        dense = dense[None, None]
    return np.broadcast_to(dense, (*match.mask.mask_index.shape, *dense.shape[2:]))


@pytest.mark.parametrize("fill", [-np.inf, LOWEST, -1e9, -65504.0, -1e4])
@pytest.mark.parametrize("style", ["add", "where", "where-inverted", "add-inverted"])
def test_causal_constants(style, fill, tmp_path, rng):
    additive = np.where(CAUSAL, 0, fill).astype(np.float32)

    def terms(g: Graph, x: str) -> str:
        if style == "add":
            return g.add("Add", g.const(additive), x)
        if style == "add-inverted":
            return g.add("Sub", x, g.const(-additive))
        if style == "where":
            return g.add("Where", g.const(CAUSAL), x, g.const(fill))
        return g.add("Where", g.const(~CAUSAL), g.const(fill), x)

    match = found_in(terms, tmp_path, rng).only
    np.testing.assert_array_equal(allowed(match), CAUSAL[None, None])
    assert match.bias.kind is BiasKind.NONE and match.masked_row is MaskedRow.ZERO
    assert (match.score_bound < np.inf) == np.isfinite(fill)
    if fill == -1e4:
        assert 4900 < match.score_bound < 10000


@pytest.mark.parametrize("value", [-100.0, -9000.0, 3.5])
def test_a_constant_that_could_matter_is_bias(value, tmp_path, rng):
    match = found_in(add(np.where(CAUSAL, 0, value)), tmp_path, rng).only
    assert match.mask is None and match.bias.kind is BiasKind.RELATIVE
    assert match.bias.array is not None and set(np.unique(match.bias.array)) == {np.float32(value), 0}


def test_a_score_replaced_by_a_number_that_is_no_mask_is_refused(tmp_path, rng):
    refusal = found_in(where(CAUSAL, 0.0), tmp_path, rng).refused
    assert "no mask constant" in refusal.reason and "Where" in refusal.nodes[0]


def test_a_mask_constant_beside_a_positive_bias_stays_a_mask(tmp_path, rng):
    """-1e4 + 1.5 is above -1e4, but one of its terms is a mask constant."""
    bias = np.abs(rng.standard_normal((4, 9, 9)))
    match = found_in(both(add(bias), add(np.where(CAUSAL, 0, -1e4))), tmp_path, rng).only
    np.testing.assert_array_equal(allowed(match)[0, 0], CAUSAL)


def test_a_row_of_near_mask_constants_is_refused(tmp_path, rng):
    """In a row of -9999 a key at -10001 is no hidden key."""
    near = np.zeros((9, 9))
    near[4], near[4, 3] = -9999.0, -10001.0
    assert "close to the mask constants" in found_in(add(near), tmp_path, rng).refused.reason


def test_terms_in_any_order_and_number(tmp_path, rng):
    window = np.abs(np.arange(9) - np.arange(9)[:, None]) <= 2
    relative = rng.standard_normal((4, 17)).astype(np.float32)
    bias = relative[:, np.arange(9) - np.arange(9)[:, None] + 8]
    steps = [where(CAUSAL, LOWEST), add(bias[None]), add(np.where(window, 0, -np.inf)), where(window, -1e9)]
    for _ in range(3):
        order = list(rng.permutation(4))
        match = found_in(both(*(steps[i] for i in order)), tmp_path, rng).only
        np.testing.assert_array_equal(allowed(match), (CAUSAL & window)[None, None])
        assert match.bias.kind is BiasKind.RELATIVE and match.bias.rel_rq == 9


def test_scores_multiplied_by_a_mask(tmp_path, rng):
    """w * b - 1e4 * (1 - b), as the first GPT-2 had it."""
    b = CAUSAL.astype(np.float32)
    match = found_in(lambda g, x: g.add("Sub", g.add("Mul", x, g.const(b)), g.const(1e4 * (1 - b))), tmp_path, rng).only
    np.testing.assert_array_equal(allowed(match), CAUSAL[None, None])


def test_a_factor_after_the_mask_scales_mask_and_bias(tmp_path, rng):
    bias = rng.standard_normal((1, 4, 9, 9)).astype(np.float32)
    terms = both(add(bias), add(np.where(CAUSAL, 0, -1e9)), lambda g, x: g.add("Mul", x, g.const(0.5)))
    match = found_in(terms, tmp_path, rng).only
    assert match.scale == 0.125
    assert match.bias.array is not None
    np.testing.assert_allclose(match.bias.array[:, :, 8], 0.5 * bias[:, :, 8], rtol=1e-6)


def test_masks_that_differ_by_head_and_batch(tmp_path, rng):
    keep = rng.random((2, 4, 9, 9)) < 0.5
    keep[..., 0] = True
    match = found_in(add(np.where(keep, 0, -np.inf)), tmp_path, rng).only
    np.testing.assert_array_equal(allowed(match), keep)
    assert match.mask is not None and match.mask.mask_index.shape == (2, 4)


def test_equal_masks_of_all_heads_are_one(tmp_path, rng):
    match = found_in(add(np.broadcast_to(np.where(CAUSAL, 0, -np.inf), (2, 4, 9, 9))), tmp_path, rng).only
    assert match.mask is not None and match.mask.n_masks == 1 and match.mask.mask_index.shape == (1, 1)


def test_windows_joined_to_the_batch(tmp_path, rng):
    """Swin: scores [B * windows, H, N, N] seen as [B, windows, H, N, N] for the mask of each window."""
    keep = rng.random((3, 9, 9)) < 0.5
    keep[:, :, 0] = True

    def terms(g: Graph, x: str) -> str:
        five = g.add("Reshape", x, g.ints(2, 3, 4, 9, 9))
        five = g.add("Add", five, g.const(np.where(keep, 0.0, -1e9)[None, :, None]))
        return g.add("Reshape", five, g.ints(6, 4, 9, 9))

    match = found_in(terms, tmp_path, rng, Sizes(batch=6)).only
    np.testing.assert_array_equal(allowed(match)[:, 0], np.concatenate([keep, keep]))


def test_an_all_allowing_mask_is_none(tmp_path, rng):
    match = found_in(both(add(np.zeros((9, 9))), where(np.ones((9, 9), bool), -np.inf)), tmp_path, rng).only
    assert match.mask is None and match.bias.kind is BiasKind.NONE


def test_mask_computed_in_the_graph(tmp_path, rng):
    """Range, comparisons, window by Sub: evaluated, not guessed."""

    def terms(g: Graph, x: str) -> str:
        steps = g.add("Range", g.const(0, np.int64), g.const(9, np.int64), g.const(1, np.int64))
        rows, cols = g.add("Unsqueeze", steps, g.ints(1)), g.add("Unsqueeze", steps, g.ints(0))
        seen = g.add("And", g.add("LessOrEqual", cols, rows), g.add("Greater", cols, g.add("Sub", rows, g.ints(3))))
        return g.add("Add", x, g.add("Where", seen, g.const(0.0), g.const(LOWEST)))

    match = found_in(terms, tmp_path, rng).only
    q, k = np.ogrid[:9, :9]
    np.testing.assert_array_equal(allowed(match)[0, 0], (k <= q) & (k > q - 3))


def test_mask_that_depends_on_random_numbers_is_refused(tmp_path):
    g = Graph()

    def terms(g: Graph, x: str) -> str:
        noise = g.add("RandomUniform", shape=[9, 9], seed=1.0)
        return g.add("Where", g.add("Greater", noise, g.const(0.5)), x, g.const(-1e9))

    attention(g, terms=terms)
    refusal = find(g.model(), tmp_path).refused
    assert "run-time mask" in refusal.reason and "Where" in refusal.nodes[0]


# ---- bias ----


def test_relative_bias_through_a_table(tmp_path, rng):
    """T5: an embedding of clipped distances, one vector a head."""
    table = rng.standard_normal((5, 4)).astype(np.float32)

    def terms(g: Graph, x: str) -> str:
        steps = g.add("Range", g.const(0, np.int64), g.const(9, np.int64), g.const(1, np.int64))
        distance = g.add("Sub", g.add("Unsqueeze", steps, g.ints(0)), g.add("Unsqueeze", steps, g.ints(1)))
        bucket = g.add("Min", g.add("Abs", distance), g.const(4, np.int64))
        bias = g.add("Transpose", g.add("Gather", g.const(table), bucket), perm=[2, 0, 1])
        return g.add("Add", x, g.add("Unsqueeze", bias, g.ints(0)))

    match = found_in(terms, tmp_path, rng).only
    assert match.bias.kind is BiasKind.RELATIVE and match.bias.array is not None
    np.testing.assert_array_equal(match.bias.array, table[np.minimum(np.abs(np.arange(-8, 9)), 4)].T)


def test_relative_bias_of_different_lengths(tmp_path, rng):
    vector = rng.standard_normal(5 + 13 - 1).astype(np.float32)
    q, k = np.ogrid[:5, :13]
    match = found_in(add(vector[k - q + 4]), tmp_path, rng, Sizes(seq_q=5, seq_kv=13)).only
    assert match.bias.rel_rq == 5 and match.bias.array is not None
    np.testing.assert_array_equal(match.bias.array, vector[None])


def test_one_differing_entry_makes_the_bias_dense(tmp_path, rng):
    vector = rng.standard_normal(17).astype(np.float32)
    q, k = np.ogrid[:9, :9]
    bias = vector[k - q + 8]
    bias[3, 6] = np.nextafter(bias[3, 6], np.float32(9))
    match = found_in(add(bias), tmp_path, rng).only
    assert match.bias.kind is BiasKind.DENSE and match.bias.array is not None
    assert match.bias.array.shape == (1, 1, 9, 9)


def test_masked_entries_of_a_relative_bias_do_not_matter(tmp_path, rng):
    vector = rng.standard_normal(17).astype(np.float32)
    q, k = np.ogrid[:9, :9]
    bias = np.where(CAUSAL, vector[k - q + 8], -1e30)
    match = found_in(add(bias), tmp_path, rng).only
    assert match.bias.kind is BiasKind.RELATIVE
    np.testing.assert_array_equal(allowed(match)[0, 0], CAUSAL)


@pytest.mark.parametrize("heads", [4, 6])
def test_slope_of_the_key_alone_is_relative(heads, tmp_path, rng):
    """ALiBi as MPT and BLOOM write it: slope * k; softmax does not see what a row has in common."""
    slopes = 2.0 ** -(8 / heads * np.arange(1, heads + 1))
    bias = (slopes[:, None, None] * np.arange(-8, 1)).astype(np.float32)
    terms = both(add(bias), add(np.where(CAUSAL, 0, -np.inf)))
    match = found_in(terms, tmp_path, rng, Sizes(heads=heads, kv_heads=heads)).only
    assert match.bias.kind is BiasKind.RELATIVE and match.bias.array is not None
    np.testing.assert_allclose(match.bias.array, slopes[:, None] * np.arange(-8, 9), rtol=1e-6)


def test_a_bend_in_the_slope_makes_the_bias_dense(tmp_path, rng):
    bias = 0.25 * np.arange(9.0)
    bias[4] += 0.01
    match = found_in(add(np.broadcast_to(bias, (9, 9))), tmp_path, rng).only
    assert match.bias.kind is BiasKind.DENSE


def test_bias_of_batch_entries(tmp_path, rng):
    match = found_in(add(rng.standard_normal((2, 1, 9, 9))), tmp_path, rng).only
    assert match.bias.array is not None and match.bias.array.shape == (2, 1, 9, 9)


def test_run_time_bias(tmp_path, rng):
    g = Graph()
    bias = g.input("bias", [4, 9, 9])
    attention(g, terms=both(add(np.where(CAUSAL, 0, -np.inf)), lambda g, x: g.add("Add", x, bias)))
    model = g.model()
    found = find(model, tmp_path)
    match = found.only
    assert match.bias.kind is BiasKind.DENSE and match.bias.tensor is not None and match.bias.tensor.name == "bias"
    check(found, feeds(model, rng))


def test_run_time_mask_becomes_a_bool_bias(tmp_path, rng):
    g = Graph()
    mask = g.input("mask", [2, 1, 9, 9], np.bool_)
    attention(g, terms=lambda g, x: g.add("Where", mask, x, g.const(-np.inf)))
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.bias.tensor is not None and found.only.bias.tensor.name == "mask"
    assert found.only.masked_row is MaskedRow.NAN
    inputs = feeds(model, rng)
    check(found, inputs)
    inputs["mask"][0, 0, 3] = False
    check(found, inputs)


def test_run_time_mask_with_a_finite_constant_is_refused(tmp_path):
    g = Graph()
    mask = g.input("mask", [2, 1, 9, 9], np.bool_)
    attention(g, terms=lambda g, x: g.add("Where", mask, x, g.const(-1e9)))
    assert "finite constant" in find(g.model(), tmp_path).refused.reason


def test_run_time_bias_beside_finite_masks_is_refused(tmp_path):
    """The bias may itself hold mask constants: then rows without keys mean something else."""
    g = Graph()
    bias = g.input("bias", [4, 9, 9])
    attention(g, terms=both(add(np.where(CAUSAL, 0, LOWEST)), lambda g, x: g.add("Add", x, bias)))
    assert "run-time mask beside finite" in find(g.model(), tmp_path).refused.reason


def test_two_run_time_biases_are_refused(tmp_path):
    g = Graph()
    one, two = g.input("one", [4, 9, 9]), g.input("two", [4, 9, 9])
    attention(g, terms=lambda g, x: g.add("Add", g.add("Add", x, one), two))
    assert "known only at run time" in find(g.model(), tmp_path).refused.reason


# ---- rows without keys ----

EMPTY = CAUSAL.copy()
EMPTY[[2, 5]] = False


@pytest.mark.parametrize(
    ("terms", "probabilities", "row"),
    [
        (add(np.where(EMPTY, 0, -np.inf)), None, MaskedRow.NAN),
        (add(np.where(EMPTY, 0, -np.inf)), guard, MaskedRow.ZERO),
        (where(EMPTY, -np.inf), guard, MaskedRow.ZERO),
        (where(EMPTY, -1e4), None, MaskedRow.MEAN),
        (where(EMPTY, LOWEST), None, MaskedRow.MEAN),
        (where(EMPTY, LOWEST), guard, MaskedRow.MEAN),
        (add(np.where(EMPTY, 0, LOWEST)), None, MaskedRow.MEAN),
        (add(np.where(EMPTY, 0, -1e4)), None, MaskedRow.SCORES),
        (add(np.where(EMPTY, 0, -65504.0)), None, MaskedRow.SCORES),
        (both(add(np.where(EMPTY, 0, LOWEST)), add(np.where(EMPTY, 0, LOWEST))), None, MaskedRow.NAN),
    ],
)
def test_row_without_keys(terms, probabilities, row, tmp_path, rng):
    # A constant that shifts all scores alike also rounds them: up to half a unit of 65504 in float32, 1/256 relative.
    tolerance = 8e-3 if row is MaskedRow.SCORES else 0.0
    match = found_in(terms, tmp_path, rng, probabilities=probabilities, tolerance=tolerance).only
    assert match.masked_row is row


def test_a_row_without_keys_has_no_bias_where_its_entries_had_none(tmp_path, rng):
    """A bias of k - q in allowed entries: the vector that other rows have would put it into this one as well."""
    q, k = np.ogrid[:9, :9]
    bias = np.where(EMPTY, rng.standard_normal(17)[k - q + 8], -1e4)
    match = found_in(add(bias), tmp_path, rng, tolerance=8e-3).only
    assert match.masked_row is MaskedRow.SCORES and match.bias.kind is BiasKind.DENSE


@pytest.mark.parametrize("value", [-np.inf, -1e9])
def test_row_without_keys_in_half_precision(value, tmp_path, rng):
    """-1e9 is -inf in float16."""
    terms = add(np.where(EMPTY, 0, value), np.float16)
    match = found_in(terms, tmp_path, rng, Sizes(dtype=np.float16)).only
    assert match.masked_row is MaskedRow.NAN


@pytest.mark.parametrize(("value", "dtype"), [(-65504.0, np.float16), (-1e9, np.float32)])
def test_constant_that_swallows_only_small_scores_is_refused(value, dtype, tmp_path, rng):
    """-65504 in float16 swallows scores below 16, -1e9 in float32 those below 32; greater ones decide the row."""
    refusal = found_in(add(np.where(EMPTY, 0, value), dtype), tmp_path, rng, Sizes(dtype=dtype)).refused
    assert "keeps only part of each score" in refusal.reason


def test_half_precision_constant_that_keeps_part_of_the_scores_is_refused(tmp_path, rng):
    """-1e4 + x in float16 is a multiple of 8: neither the scores nor a mean."""
    refusal = found_in(add(np.where(EMPTY, 0, -1e4), np.float16), tmp_path, rng, Sizes(dtype=np.float16)).refused
    assert "keeps only part of each score" in refusal.reason


def test_half_precision_constant_without_empty_rows_is_a_mask(tmp_path, rng):
    match = found_in(add(np.where(CAUSAL, 0, -1e4), np.float16), tmp_path, rng, Sizes(dtype=np.float16)).only
    np.testing.assert_array_equal(allowed(match)[0, 0], CAUSAL)


def test_two_lowest_constants_leave_a_subset(tmp_path, rng):
    """Where both terms mask, the sum is -inf, elsewhere it is finite: uniform over a subset of the keys."""
    left = np.ones((9, 9), bool)
    left[:, :3] = False
    terms = both(add(np.where(CAUSAL, 0, LOWEST)), add(np.where(left, 0, LOWEST)))
    refusal = found_in(terms, tmp_path, rng).refused
    assert "mixes different mask constants" in refusal.reason


def test_rows_that_are_empty_in_two_ways_are_refused(tmp_path, rng):
    mixed = np.where(CAUSAL, 0, -np.inf)
    mixed[2], mixed[5] = -np.inf, -1e4
    refusal = found_in(add(mixed), tmp_path, rng).refused
    assert "do not all have the same meaning" in refusal.reason


def test_mask_cast_to_half_before_the_softmax(tmp_path, rng):
    """The lowest float32 becomes -inf in float16."""
    g = Graph()
    terms = both(add(np.where(EMPTY, 0, LOWEST)), lambda g, x: g.add("Cast", x, to=10))
    attention(g, terms=terms, probabilities=lambda g, x: g.add("Cast", x, to=1))
    found = find(g.model(), tmp_path)
    assert found.only.masked_row is MaskedRow.NAN


def zero_rows(mask: str) -> Steps:
    """Where(ReduceMax(mask) == -inf, 0, p), as newer releases of ONNX define Attention."""

    def step(g: Graph, x: str) -> str:
        largest = g.add("ReduceMax", mask, g.ints(-1))
        return g.add("Where", g.add("Equal", largest, g.const(-np.inf)), g.const(0.0), x)

    return step


def test_rows_zeroed_by_a_test_of_the_mask(tmp_path, rng):
    g = Graph()
    mask = g.const(np.where(EMPTY, 0, -np.inf))
    attention(g, terms=lambda g, x: g.add("Add", x, mask), probabilities=zero_rows(mask))
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.masked_row is MaskedRow.ZERO
    check(found, feeds(model, rng))


def test_rows_zeroed_by_a_test_of_a_run_time_mask(tmp_path, rng):
    g = Graph()
    mask = g.input("mask", [2, 1, 9, 9])
    attention(g, terms=lambda g, x: g.add("Add", x, mask), probabilities=zero_rows(mask))
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.masked_row is MaskedRow.ZERO
    inputs = feeds(model, rng)
    inputs["mask"][1, 0, 4] = -np.inf
    check(found, inputs)


def test_rows_zeroed_by_another_test_are_refused(tmp_path):
    g = Graph()
    mask, other = g.const(np.where(EMPTY, 0, -np.inf)), g.const(np.where(CAUSAL, 0, -np.inf))
    attention(g, terms=lambda g, x: g.add("Add", x, mask), probabilities=zero_rows(other))
    assert "set to 0" in find(g.model(), tmp_path).refused.reason
