"""Run-time biases in half precision: constants that round scores away, and values that nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from stof_onnx.attention.types import AttentionMatch, BiasKind, Refusal

from tests.attention.graphs import Graph, Sizes, attention, feeds
from tests.attention.reference import Found, check, find

CAUSAL = np.tril(np.ones((9, 9), bool))
LOST = "keeps only part of each score"


def masked(fill: float, dtype: Any, fill_dtype: Any = None, table: float | None = None) -> onnx.ModelProto:
    """scores + Where(run-time bool [2, 1, 9, 9], 0, fill), with a causal table of 0 and `table` where it is given."""
    g = Graph()
    mask = g.input("mask", [2, 1, 9, 9], np.bool_)
    kind = fill_dtype or dtype

    def terms(g: Graph, x: str) -> str:
        bias = g.add("Where", mask, g.const(0, kind), g.const(fill, kind))
        if kind is not dtype:
            bias = g.add("Cast", bias, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
        if table is not None:
            bias = g.add("Add", g.const(np.where(CAUSAL, 0, table), dtype), bias)
        return g.add("Add", x, bias)

    attention(g, Sizes(dtype=dtype), terms)
    return g.model()


def replaced(model: onnx.ModelProto, tmp_path: Path, rng: np.random.Generator, half: bool, assume: bool = False) -> Any:
    """The one match, after its meaning was checked on masks that leave every row a key."""
    found = find(model, tmp_path, assume=assume)
    tolerance = 5e-3 if half else 2e-5
    check(found, feeds(model, rng), rtol=tolerance, atol=tolerance)
    assert found.only.bias.kind is BiasKind.DENSE
    return found


@pytest.mark.parametrize("fill", [-65504.0, -1e4, -3e4])
def test_finite_constants_in_float16_are_refused(fill, tmp_path, rng):
    model = masked(fill, np.float16)
    reason = find(model, tmp_path).refused.reason
    assert LOST in reason and "float16" in reason and "--assume-no-empty-rows" in reason
    found = replaced(model, tmp_path, rng, half=True, assume=True)
    assert any("no input hides all keys" in note for note in found.only.notes)


def test_what_is_refused_would_be_wrong(tmp_path, rng):
    """A row of nothing but -65504: uniform in float16, the softmax of the scores in float32."""
    model = masked(-65504.0, np.float16)
    found = find(model, tmp_path, assume=True)
    inputs = feeds(model, rng)
    inputs["mask"][0, 0, 3] = False
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(found, inputs, rtol=5e-3, atol=5e-3)


def test_a_table_of_constants_beside_minus_infinity_is_seen(tmp_path):
    assert LOST in find(masked(-np.inf, np.float16, table=-65504.0), tmp_path).refused.reason


# The original rounds sums near -100 to sixteenths, so its weights in a row of such keys are off by up to exp(1/16).
@pytest.mark.parametrize(
    ("fill", "fill_dtype", "tolerance"),
    [(-np.inf, np.float16, 2e-2), (-1e9, np.float32, 2e-2), (-100.0, np.float16, 0.1)],
)
def test_minus_infinity_and_small_numbers_stay(fill, fill_dtype, tolerance, tmp_path, rng):
    """-1e9 becomes -inf on its way to float16."""
    model = masked(fill, np.float16, fill_dtype)
    found: Found = replaced(model, tmp_path, rng, half=True)
    assert found.only.notes == ()
    inputs = feeds(model, rng)
    inputs["mask"][0, 0, 3] = False
    check(found, inputs, rtol=2e-2, atol=tolerance)


@pytest.mark.parametrize("fill", [-65504.0, -1e4, float(np.finfo(np.float32).min)])
def test_float32_adds_as_the_original_does(fill, tmp_path, rng):
    model = masked(fill, np.float32)
    found = replaced(model, tmp_path, rng, half=False)
    assert found.only.notes == ()


def test_constants_of_a_comparison_do_not_count(tmp_path, rng):
    """A bool takes nothing of the numbers above it along."""
    g = Graph()
    ages = g.input("ages", [2, 1, 9, 9], np.float16)

    def terms(g: Graph, x: str) -> str:
        old = g.add("Greater", ages, g.const(2e4, np.float16))
        return g.add("Add", x, g.add("Where", old, g.const(-np.inf, np.float16), g.const(0.5, np.float16)))

    attention(g, Sizes(dtype=np.float16), terms)
    assert replaced(g.model(), tmp_path, rng, half=True).only.notes == ()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_bias_that_the_caller_gives_is_noted_in_half_precision(dtype, tmp_path, rng):
    g = Graph()
    bias = g.input("bias", [4, 9, 9], dtype)
    attention(g, Sizes(dtype=dtype), lambda g, x: g.add("Add", x, g.add("Mul", bias, g.const(2, dtype))))
    notes = replaced(g.model(), tmp_path, rng, half=dtype is np.float16).only.notes
    assert any("added in float32" in note for note in notes) is (dtype is np.float16)


def opset_23(mask: Any, tmp_path: Path, assume: bool, dtype: Any) -> AttentionMatch | Refusal:
    """The ONNX operator with a mask that `mask` makes from run-time padding [2, 9]."""
    g = Graph(opset=23)
    pad = g.input("pad", [2, 9], np.int64)
    names = [g.input(name, [2, 4, 9, 8], dtype) for name in "qkv"]
    g.output(g.add("Attention", *names, mask(g, pad)))
    found = find(g.model(), tmp_path, assume=assume)
    return found.refused if found.refusals else found.only


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_operator_with_a_table_and_padding_of_constants(dtype, tmp_path):
    """Causal and padding, each adding -65504: -inf in float16, so an empty row is uniform over a subset."""

    def mask(g: Graph, pad: str) -> str:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        seen = g.add("Cast", g.add("Unsqueeze", pad, g.ints(1, 2)), to=kind)
        hidden = g.add("Mul", g.add("Sub", g.const(1, dtype), seen), g.const(-65504, dtype))
        return g.add("Add", g.const(np.where(CAUSAL, 0, -65504), dtype), hidden)

    plain = opset_23(mask, tmp_path, False, dtype)
    if dtype is np.float16:
        assert isinstance(plain, Refusal) and LOST in plain.reason
    else:
        assert isinstance(plain, AttentionMatch) and plain.bias.kind is BiasKind.DENSE
    match = opset_23(mask, tmp_path, True, dtype)
    assert isinstance(match, AttentionMatch) and match.bias.kind is BiasKind.NONE
    assert match.mask is not None and match.kv_mask.tensor is not None
    assert any("no input hides all keys" in note for note in match.notes)
