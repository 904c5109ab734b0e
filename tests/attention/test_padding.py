"""Key padding known only at run time, in the forms exporters give it, alone and beside static masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stof_onnx.attention.types import BiasKind, KvKind, MaskedRow
from stof_onnx.mask import decode

from tests.attention.graphs import Graph, Sizes, attention, feeds
from tests.attention.reference import Found, check, find

LOWEST = float(np.finfo(np.float32).min)
CAUSAL = np.tril(np.ones((9, 9), bool))
Pads = Callable[[Graph, str, str], str]


def to_float(g: Graph, x: str) -> str:
    return g.add("Cast", x, to=1)


def four_axes(g: Graph, x: str) -> str:
    return g.add("Unsqueeze", g.add("Unsqueeze", x, g.ints(1)), g.ints(2))


def bert(g: Graph, x: str, pad: str) -> str:
    """(1 - mask) * lowest, added."""
    hidden = g.add("Sub", g.const(1.0), to_float(g, four_axes(g, pad)))
    return g.add("Add", x, g.add("Mul", hidden, g.const(LOWEST)))


def bert_1e4(g: Graph, x: str, pad: str) -> str:
    hidden = g.add("Sub", g.const(1.0), to_float(g, four_axes(g, pad)))
    return g.add("Add", x, g.add("Mul", hidden, g.const(-1e4)))


def filled(g: Graph, x: str, pad: str) -> str:
    """masked_fill(mask == 0, -inf), expanded over heads and queries."""
    hidden = g.add("Equal", four_axes(g, pad), g.const(0, np.int64))
    return g.add("Where", g.add("Expand", hidden, g.ints(1, 4, 9, 9)), g.const(-np.inf), x)


def divided(g: Graph, x: str, pad: str) -> str:
    """-inf where padded through a table: Where(mask, 0, -inf) gathered from the bool mask."""
    table = g.add("Where", g.add("Cast", pad, to=9), g.const(0.0), g.const(-np.inf))
    return g.add("Add", x, g.add("Reshape", table, g.ints(2, 1, 1, 9)))


def gathered(g: Graph, x: str, pad: str) -> str:
    """The masking functions of transformers 5: And(causal, GatherND(mask, [b, k]))."""
    b, k = np.meshgrid(np.arange(2), np.arange(9), indexing="ij")
    seen = g.add("GatherND", g.add("Cast", pad, to=9), g.const(np.stack([b, k], -1)[:, None, None], np.int64))
    both = g.add("And", g.const(CAUSAL[None, None]), seen)
    return g.add("Add", x, g.add("Where", both, g.const(0.0), g.const(LOWEST)))


def multiplied(g: Graph, x: str, pad: str) -> str:
    """A float mask that is itself causal * padding."""
    seen = g.add("Mul", g.const(CAUSAL.astype(np.float32)[None, None]), to_float(g, four_axes(g, pad)))
    return g.add("Add", x, g.add("Mul", g.add("Sub", g.const(1.0), seen), g.const(LOWEST)))


def search(form: Pads, tmp_path: Path, rng: np.random.Generator, dtype: Any = np.int64, assume: bool = False) -> Found:
    g = Graph()
    pad = g.input("pad", [2, 9], dtype)
    attention(g, terms=lambda g, x: form(g, x, pad))
    model = g.model()
    found = find(model, tmp_path, assume=assume)
    inputs = feeds(model, rng)
    check(found, inputs)
    if not assume:
        empty = {**inputs, "pad": inputs["pad"].copy()}
        empty["pad"][1] = 0
        empty["pad"][0, :4] = 0
        check(found, empty, rtol=1e-3, atol=1e-3)
    return found


@pytest.mark.parametrize(
    ("form", "row"),
    [
        (bert, MaskedRow.MEAN),
        (bert_1e4, MaskedRow.SCORES),
        (filled, MaskedRow.NAN),
        (divided, MaskedRow.NAN),
    ],
)
def test_padding_alone(form, row, tmp_path, rng):
    match = search(form, tmp_path, rng).only
    assert match.kv_mask.kind is KvKind.MASK and match.kv_mask.tensor is not None
    assert match.mask is None and match.bias.kind is BiasKind.NONE
    assert match.masked_row is row


@pytest.mark.parametrize("form", [gathered, multiplied])
def test_static_part_is_split_off(form, tmp_path, rng):
    match = search(form, tmp_path, rng).only
    assert match.kv_mask.kind is KvKind.MASK and match.mask is not None
    np.testing.assert_array_equal(np.squeeze(decode(match.mask)), CAUSAL)
    assert match.masked_row is MaskedRow.MEAN


def test_integers_are_taken_as_0_and_1_and_the_report_says_so(tmp_path, rng):
    match = search(bert, tmp_path, rng).only
    assert any("'pad'" in note and "0 and 1" in note for note in match.notes)


def test_booleans_need_no_such_note(tmp_path, rng):
    match = search(filled, tmp_path, rng).only
    assert not any("0 and 1" in note for note in match.notes)


def test_inverted_padding(tmp_path, rng):
    """PyTorch's key_padding_mask: True hides."""

    def form(g: Graph, x: str, pad: str) -> str:
        return g.add("Where", four_axes(g, g.add("Cast", pad, to=9)), g.const(-np.inf), x)

    g = Graph()
    pad = g.input("pad", [2, 9], np.bool_)
    attention(g, terms=lambda g, x: form(g, x, pad))
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.kv_mask.invert
    inputs = feeds(model, rng)
    inputs["pad"][:, 0] = False
    check(found, inputs)


def test_padding_of_rank_4(tmp_path, rng):
    g = Graph()
    pad = g.input("pad", [2, 1, 1, 9], np.bool_)
    attention(g, terms=lambda g, x: g.add("Where", pad, x, g.const(-np.inf)))
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.kv_mask.kind is KvKind.MASK
    check(found, feeds(model, rng))


def test_two_terms_of_lowest_constants_are_refused(tmp_path, rng):
    """Causal and padding, each adding the lowest float: a row without keys is uniform over a subset."""

    def form(g: Graph, x: str, pad: str) -> str:
        return bert(g, g.add("Add", x, g.const(np.where(CAUSAL, 0, LOWEST))), pad)

    g = Graph()
    pad = g.input("pad", [2, 9], np.int64)
    attention(g, terms=lambda g, x: form(g, x, pad))
    refusal = find(g.model(), tmp_path).refused
    assert "mixes different mask constants" in refusal.reason and "--assume-no-empty-rows" in refusal.reason
    match = search(form, tmp_path, rng, assume=True).only
    assert match.mask is not None and any("assumed" in note for note in match.notes)


def test_causal_of_minus_infinity_and_padding_of_a_constant_are_refused(tmp_path):
    def form(g: Graph, x: str, pad: str) -> str:
        return bert(g, g.add("Where", g.const(CAUSAL), x, g.const(-np.inf)), pad)

    g = Graph()
    pad = g.input("pad", [2, 9], np.int64)
    attention(g, terms=lambda g, x: form(g, x, pad))
    assert "mixes" in find(g.model(), tmp_path).refused.reason


def test_causal_and_padding_both_minus_infinity(tmp_path, rng):
    def form(g: Graph, x: str, pad: str) -> str:
        return filled(g, g.add("Where", g.const(CAUSAL), x, g.const(-np.inf)), pad)

    assert search(form, tmp_path, rng).only.masked_row is MaskedRow.NAN


def test_bias_and_padding(tmp_path, rng):
    """T5: one tensor, position bias plus extended mask."""
    vector = rng.standard_normal((4, 17)).astype(np.float32)
    q, k = np.ogrid[:9, :9]

    def form(g: Graph, x: str, pad: str) -> str:
        hidden = g.add("Mul", g.add("Sub", g.const(1.0), to_float(g, four_axes(g, pad))), g.const(LOWEST))
        return g.add("Add", x, g.add("Add", g.const(vector[:, k - q + 8][None]), hidden))

    match = search(form, tmp_path, rng).only
    assert match.bias.kind is BiasKind.RELATIVE and match.kv_mask.kind is KvKind.MASK
    assert match.masked_row is MaskedRow.MEAN


def test_run_time_bias_and_padding(tmp_path, rng):
    """Disentangled attention: content-dependent bias from a product, then padding."""
    g = Graph()
    pad = g.input("pad", [2, 9], np.int64)
    content = g.add("MatMul", g.input("a", [2, 4, 9, 8]), g.input("b", [2, 4, 8, 9]))
    content = g.add("Clip", content)
    attention(g, terms=lambda g, x: bert(g, g.add("Add", x, g.add("Exp", content)), pad))
    model = g.model()
    found = find(model, tmp_path)
    match = found.only
    assert match.bias.tensor is not None and match.kv_mask.kind is KvKind.MASK
    check(found, feeds(model, rng))


def test_padding_of_queries_is_no_key_padding(tmp_path):
    g = Graph()
    pad = g.input("pad", [2, 9], np.bool_)

    def terms(g: Graph, x: str) -> str:
        rows = g.add("Reshape", pad, g.ints(2, 1, 9, 1))
        return g.add("Where", rows, x, g.const(-1e9))

    attention(g, terms=terms)
    refusal = find(g.model(), tmp_path).refused
    assert "neither key padding nor one bias" in refusal.reason or "finite constant" in refusal.reason


def test_outer_product_of_paddings_is_no_key_padding(tmp_path, rng):
    g = Graph()
    pad = g.input("pad", [2, 9], np.bool_)

    def terms(g: Graph, x: str) -> str:
        seen = g.add("And", g.add("Reshape", pad, g.ints(2, 1, 9, 1)), g.add("Reshape", pad, g.ints(2, 1, 1, 9)))
        return g.add("Add", x, g.add("Where", seen, g.const(0.0), g.const(-np.inf)))

    attention(g, terms=terms)
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.kv_mask.kind is KvKind.NONE and found.only.bias.tensor is not None
    check(found, feeds(model, rng))


def test_batch_and_key_axes_swapped_are_no_key_padding(tmp_path):
    """With B = S the sizes fit, the index map does not."""
    g, s = Graph(), Sizes(batch=9)
    pad = g.input("pad", [9, 9], np.bool_)

    def terms(g: Graph, x: str) -> str:
        turned = g.add("Transpose", pad, perm=[1, 0])
        return g.add("Where", g.add("Reshape", turned, g.ints(9, 1, 9, 1)), x, g.const(-1e9))

    attention(g, s, terms=terms)
    found = find(g.model(), tmp_path)
    assert not any(m.kv_mask.kind is KvKind.MASK for m in found.matches)


def test_padding_that_spares_the_diagonal_is_refused(tmp_path):
    """A hidden key is still seen by its own query: no key padding says that."""
    g = Graph()
    pad = g.input("pad", [2, 9], np.bool_)

    def terms(g: Graph, x: str) -> str:
        seen = g.add("Or", four_axes(g, pad), g.const(np.eye(9, dtype=bool)))
        return g.add("Where", seen, x, g.const(-1e9))

    attention(g, terms=terms)
    found = find(g.model(), tmp_path)
    assert not found.matches


def test_sums_of_the_padding_are_no_key_padding(tmp_path):
    """Every key depends on the whole row (CumSum), as position ids do."""
    g = Graph()
    pad = g.input("pad", [2, 9], np.int64)

    def terms(g: Graph, x: str) -> str:
        seen = g.add("Greater", g.add("CumSum", pad, g.const(1, np.int64)), g.const(2, np.int64))
        return g.add("Where", four_axes(g, seen), x, g.const(-1e9))

    attention(g, terms=terms)
    found = find(g.model(), tmp_path)
    # The sums themselves are a [B, Skv] tensor; what is hidden follows from it key by key.
    assert all(m.kv_mask.tensor is not None and m.kv_mask.tensor.name != "pad" for m in found.matches)
