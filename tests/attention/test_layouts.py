"""Scale, transposes, core ranks, expanded keys and values, packed projections, outputs: what moves and multiplies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stof_onnx.attention.types import AttentionMatch, Layout

from tests.attention.graphs import Graph, Sizes, attention, feeds, finish, heads_first, heads_last, qkv
from tests.attention.reference import check, find

BHSD, BSHD = Layout.BHSD, Layout.BSHD


def matched(g: Graph, tmp_path: Path, rng: np.random.Generator, **sizes: int) -> AttentionMatch:
    model = g.model()
    found = find(model, tmp_path)
    match = found.only
    check(found, feeds(model, rng, **sizes))
    return match


def layouts(match: AttentionMatch) -> tuple[Layout, ...]:
    return match.q_layout, match.k_layout, match.v_layout, match.o_layout


def test_plain(tmp_path, rng):
    g = Graph()
    attention(g)
    match = matched(g, tmp_path, rng)
    assert layouts(match) == (BSHD,) * 4
    assert (match.q.name, match.k.name, match.v.name) == ("q", "k", "v")
    assert match.output.name == g.outputs[0].name
    assert match.scale == 0.25
    assert match.mask is None and not match.dynamic_seq
    assert (match.num_heads, match.num_kv_heads, match.head_dim, match.seq_q) == (4, 4, 8, 9)


@pytest.mark.parametrize("where", ["q", "k", "both", "scores", "q-div", "scores-div", "k-after-transpose", "left"])
def test_scale(where, tmp_path, rng):
    g, s = Graph(), Sizes(dim=16, v_dim=24)
    q, k, v = qkv(g, s)
    qh, kh, vh = heads_first(g, q, 4, 16), heads_first(g, k, 4, 16), heads_first(g, v, 4, 24)
    half = g.const(0.5)
    if where == "q" or where == "both":
        qh = g.add("Mul", qh, half)
    if where == "left":
        qh = g.add("Mul", g.const([[[0.5]]]), qh)
    if where == "q-div":
        qh = g.add("Div", qh, g.const(2.0))
    if where == "k" or where == "both":
        kh = g.add("Mul", kh, half)
    kt = g.add("Transpose", kh, perm=[0, 1, 3, 2])
    if where == "k-after-transpose":
        kt = g.add("Mul", kt, half)
    scores = g.add("MatMul", qh, kt)
    if where == "scores":
        scores = g.add("Mul", scores, half)
    if where == "scores-div":
        scores = g.add("Div", scores, g.const(2.0))
    finish(g, s, scores, vh, scale=None)
    match = matched(g, tmp_path, rng)
    assert match.scale == (0.25 if where == "both" else 0.5)
    assert match.v_head_dim == 24
    assert (match.q.name, match.k.name) == ("q", "k")


def test_scale_computed_from_shapes(tmp_path, rng):
    """As the TorchScript exporter writes F.scaled_dot_product_attention."""
    g, s = Graph(), Sizes(batch="batch", seq_q="seq", seq_kv="seq")
    q, k, v = qkv(g, s)
    qh, kh, vh = (heads_first(g, x, 4, 8) for x in (q, k, v))
    size = g.add("Slice", g.add("Shape", qh), g.ints(-1), g.ints(2**62))
    root = g.add("Sqrt", g.add("Cast", size, to=1))
    scale = g.add("Sqrt", g.add("Div", g.const([1.0]), root))
    kt = g.add("Transpose", kh, perm=[0, 1, 3, 2])
    scores = g.add("MatMul", g.add("Mul", qh, scale), g.add("Mul", kt, scale))
    finish(g, s, scores, vh, scale=None)
    match = matched(g, tmp_path, rng, batch=2, seq=9)
    assert match.scale == pytest.approx(8**-0.5, rel=1e-6)
    assert match.dynamic_seq and match.seq_q == 0


def test_scale_that_depends_on_the_length_is_refused(tmp_path):
    g, s = Graph(), Sizes(batch="batch", seq_q="seq", seq_kv="seq")
    q, k, v = qkv(g, s)
    qh, kh, vh = (heads_first(g, x, 4, 8) for x in (q, k, v))
    length = g.add("Cast", g.add("Shape", q, start=1, end=2), to=1)
    scores = g.add("Div", g.add("MatMul", qh, g.add("Transpose", kh, perm=[0, 1, 3, 2])), length)
    finish(g, s, scores, vh, scale=None)
    refusal = find(g.model(), tmp_path, ("q:1x4x32:2x16x32", "k:1x4x32:2x16x32", "v:1x4x32:2x16x32")).refused
    assert "scale depends on the input's size" in refusal.reason


def test_scale_that_differs_by_head_is_refused(tmp_path):
    g = Graph()
    attention(g, terms=lambda g, x: g.add("Mul", x, g.const(np.arange(1, 5).reshape(1, 4, 1, 1) / 8)))
    refusal = find(g.model(), tmp_path).refused
    assert "differs between heads" in refusal.reason and "Mul" in refusal.nodes[0]


def kt_direct(g: Graph, k: str) -> str:
    return g.add("Transpose", g.add("Reshape", k, g.ints(0, 0, 4, 8)), perm=[0, 2, 3, 1])


def kt_dynamo(g: Graph, k: str) -> str:
    flat = g.add("Reshape", heads_first(g, k, 4, 8), g.ints(-1, 9, 8))
    return g.add("Reshape", g.add("Transpose", flat, perm=[0, 2, 1]), g.ints(2, 4, 8, 9))


def kt_swapped_first(g: Graph, k: str) -> str:
    turned = g.add("Reshape", g.add("Transpose", k, perm=[0, 2, 1]), g.ints(2, 4, 8, 9))
    return turned


def kt_detour(g: Graph, k: str) -> str:
    x = g.add("Unsqueeze", heads_first(g, k, 4, 8), g.ints(2))
    x = g.add("Squeeze", g.add("Identity", x), g.ints(2))
    x = g.add("Expand", x, g.ints(2, 4, 9, 8))
    x = g.add("Slice", x, g.ints(0), g.ints(2**60), g.ints(2))
    return g.add("Transpose", x, perm=[0, 1, 3, 2])


@pytest.mark.parametrize("route", [kt_direct, kt_dynamo, kt_swapped_first, kt_detour])
def test_key_transposed_by_any_route(route, tmp_path, rng):
    g, s = Graph(), Sizes()
    q, k, v = qkv(g, s)
    finish(g, s, g.add("MatMul", heads_first(g, q, 4, 8), route(g, k)), heads_first(g, v, 4, 8))
    match = matched(g, tmp_path, rng)
    assert match.k.name == "k" and match.k_layout is BSHD


def test_key_reshaped_the_wrong_way_is_not_read_as_transposed(tmp_path, rng):
    """Reshape instead of Transpose gives the same sizes (S = D) and other numbers: only the tensor behind it fits."""
    g, s = Graph(), Sizes(seq_q=8, seq_kv=8)
    q, k, v = qkv(g, s)
    kt = g.add("Reshape", heads_first(g, k, 4, 8), g.ints(2, 4, 8, 8))
    finish(g, s, g.add("MatMul", heads_first(g, q, 4, 8), kt), heads_first(g, v, 4, 8))
    found = find(g.model(), tmp_path)
    assert "no common batch and head axes" in found.refused.reason


def test_missing_transpose_is_read_as_it_is(tmp_path, rng):
    """With S = H a forgotten transpose still multiplies: then heads are where the positions seem to be."""
    g, s = Graph(), Sizes(seq_q=4, seq_kv=4)
    q, k, v = qkv(g, s)
    qh = g.add("Reshape", q, g.ints(2, 4, 4, 8))
    finish(g, s, g.add("MatMul", qh, kt_direct(g, k)), heads_first(g, v, 4, 8))
    match = matched(g, tmp_path, rng)
    assert (match.q.name, match.q_layout) == (qh, BHSD) and match.k.name == "k"


def rank3(g: Graph, x: str, dim: int) -> str:
    """[B, S, H*D] to [B*H, S, D]."""
    return g.add("Reshape", heads_first(g, x, 4, dim), g.ints(-1, 9, dim))


def test_rank_3_core(tmp_path, rng):
    g, s = Graph(), Sizes()
    q, k, v = qkv(g, s)
    scores = g.add("MatMul", rank3(g, q, 8), g.add("Transpose", rank3(g, k, 8), perm=[0, 2, 1]))
    mask = np.where(np.tril(np.ones((9, 9), bool)), 0, -np.inf)
    view = g.add("Add", g.add("Reshape", scores, g.ints(2, 4, 9, 9)), g.const(mask[None, None]))
    probs = g.add("Softmax", g.add("Reshape", view, g.ints(8, 9, 9)), axis=2)
    out = g.add("Reshape", g.add("MatMul", probs, rank3(g, v, 8)), g.ints(2, 4, 9, 8))
    g.output(heads_last(g, out, 4, 8))
    match = matched(g, tmp_path, rng)
    assert layouts(match) == (BSHD,) * 4 and match.num_heads == 4 and match.scale == 1
    assert match.mask is not None


def test_rank_3_core_with_a_term_for_each_batch_and_head(tmp_path, rng):
    g, s = Graph(), Sizes()
    q, k, v = qkv(g, s)
    bias = rng.standard_normal((8, 9, 9)).astype(np.float32)
    scores = g.add("MatMul", rank3(g, q, 8), g.add("Transpose", rank3(g, k, 8), perm=[0, 2, 1]))
    probs = g.add("Softmax", g.add("Add", scores, g.const(bias)), axis=-1)
    out = g.add("Reshape", g.add("MatMul", probs, rank3(g, v, 8)), g.ints(2, 4, 9, 8))
    g.output(heads_last(g, out, 4, 8))
    match = matched(g, tmp_path, rng)
    assert match.bias.array is not None and match.bias.array.shape == (2, 4, 9, 9)


@pytest.mark.parametrize(
    ("first", "second", "swap"),
    [("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd", True), ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", False)],
)
def test_einsum(first, second, swap, tmp_path, rng):
    g, s = Graph(), Sizes(v_dim=16)
    q, k, v = qkv(g, s)
    dims = ((q, 8), (k, 8), (v, 16))
    if swap:
        qh, kh, vh = (heads_first(g, x, 4, d) for x, d in dims)
    else:
        qh, kh, vh = (g.add("Reshape", x, g.ints(0, 0, 4, d)) for x, d in dims)
    probs = g.add("Softmax", g.add("Einsum", qh, kh, equation=first), axis=-1)
    out = g.add("Einsum", probs, vh, equation=second)
    g.output(heads_last(g, out, 4, 16) if swap else g.add("Reshape", out, g.ints(0, 0, 64)))
    assert layouts(matched(g, tmp_path, rng)) == (BSHD,) * 4


def repeat_expand(g: Graph, x: str) -> str:
    wide = g.add("Expand", g.add("Unsqueeze", x, g.ints(2)), g.ints(2, 2, 3, 9, 8))
    return g.add("Reshape", wide, g.ints(2, 6, 9, 8))


def repeat_gather(g: Graph, x: str) -> str:
    return g.add("Gather", x, g.ints(0, 0, 0, 1, 1, 1), axis=1)


@pytest.mark.parametrize("repeat", [repeat_expand, repeat_gather])
def test_expanded_keys_and_values_are_grouped_again(repeat, tmp_path, rng):
    g, s = Graph(), Sizes(heads=6, kv_heads=2)
    q, k, v = qkv(g, s)
    kh, vh = repeat(g, heads_first(g, k, 2, 8)), repeat(g, heads_first(g, v, 2, 8))
    scores = g.add("MatMul", heads_first(g, q, 6, 8), g.add("Transpose", kh, perm=[0, 1, 3, 2]))
    finish(g, s, scores, vh)
    match = matched(g, tmp_path, rng)
    assert (match.num_heads, match.num_kv_heads) == (6, 2)
    assert (match.k.name, match.v.name) == ("k", "v")


def test_heads_repeated_the_other_way_round_keep_their_copies(tmp_path, rng):
    """Query head h would read key head h % 2: no grouping says that."""
    g, s = Graph(), Sizes(heads=6, kv_heads=2)
    q, k, v = qkv(g, s)
    kh, vh = (g.add("Tile", heads_first(g, x, 2, 8), g.ints(1, 3, 1, 1)) for x in (k, v))
    scores = g.add("MatMul", heads_first(g, q, 6, 8), g.add("Transpose", kh, perm=[0, 1, 3, 2]))
    finish(g, s, scores, vh)
    match = matched(g, tmp_path, rng)
    assert match.num_kv_heads == 6 and match.k.name == kh


def test_one_key_head_broadcast_by_the_product(tmp_path, rng):
    g, s = Graph(), Sizes(heads=4, kv_heads=1)
    q, k, v = qkv(g, s)
    kt = g.add("Transpose", g.add("Unsqueeze", k, g.ints(1)), perm=[0, 1, 3, 2])
    finish(g, s, g.add("MatMul", heads_first(g, q, 4, 8), kt), g.add("Unsqueeze", v, g.ints(1)))
    match = matched(g, tmp_path, rng)
    assert match.num_kv_heads == 1 and match.k.name == "k"


def test_grouped_product_of_rank_5(tmp_path, rng):
    g, s = Graph(), Sizes(heads=6, kv_heads=2)
    q, k, v = qkv(g, s)
    q5 = g.add("Reshape", heads_first(g, q, 6, 8), g.ints(2, 2, 3, 9, 8))
    k5, v5 = (g.add("Unsqueeze", heads_first(g, x, 2, 8), g.ints(2)) for x in (k, v))
    probs = g.add("Softmax", g.add("MatMul", q5, g.add("Transpose", k5, perm=[0, 1, 2, 4, 3])), axis=-1)
    out = g.add("Reshape", g.add("MatMul", probs, v5), g.ints(2, 6, 9, 8))
    g.output(heads_last(g, out, 6, 8))
    match = matched(g, tmp_path, rng)
    assert (match.num_heads, match.num_kv_heads) == (6, 2) and match.k.name == "k"


def test_packed_projection_split(tmp_path, rng):
    g, s = Graph(), Sizes()
    x = g.input("x", [2, 9, 96])
    q, k, v = g.many("Split", 3, x, g.ints(32, 32, 32), axis=2)
    kt = g.add("Transpose", heads_first(g, k, 4, 8), perm=[0, 1, 3, 2])
    finish(g, s, g.add("MatMul", heads_first(g, q, 4, 8), kt), heads_first(g, v, 4, 8))
    match = matched(g, tmp_path, rng)
    assert (match.q.name, match.k.name, match.v.name) == (q, k, v) and match.q_layout is BSHD


def test_packed_projection_gathered(tmp_path, rng):
    """[B, S, 3, H, D] -> Transpose -> Gather, as vision transformers have it."""
    g, s = Graph(), Sizes()
    x = g.input("x", [2, 9, 96])
    five = g.add("Transpose", g.add("Reshape", x, g.ints(2, 9, 3, 4, 8)), perm=[2, 0, 3, 1, 4])
    q, k, v = (g.add("Gather", five, g.const(i, np.int64), axis=0) for i in range(3))
    finish(g, s, g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2])), v)
    match = matched(g, tmp_path, rng)
    assert (match.q.name, match.q_layout) == (q, BHSD)


def test_heads_of_three_parts_each(tmp_path, rng):
    """[B, S, H, 3 * D] cut along the last axis: Q, K and V are strided, the slices themselves are BSHD."""
    g, s = Graph(), Sizes()
    x = g.add("Reshape", g.input("x", [2, 9, 96]), g.ints(2, 9, 4, 24))
    q, k, v = (
        g.add("Transpose", g.add("Slice", x, g.ints(8 * i), g.ints(8 * i + 8), g.ints(3)), perm=[0, 2, 1, 3])
        for i in range(3)
    )
    finish(g, s, g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2])), v)
    match = matched(g, tmp_path, rng)
    assert layouts(match) == (BSHD,) * 4


def test_rotated_queries_stay_heads_first(tmp_path, rng):
    """What follows the transpose (here an Add, as in RoPE) is no movement: Q is taken behind it."""
    g, s = Graph(), Sizes()
    q, k, v = qkv(g, s)
    turned = g.add("Add", heads_first(g, q, 4, 8), g.const(rng.standard_normal((9, 8))))
    kt = g.add("Transpose", heads_first(g, k, 4, 8), perm=[0, 1, 3, 2])
    finish(g, s, g.add("MatMul", turned, kt), heads_first(g, v, 4, 8))
    match = matched(g, tmp_path, rng)
    assert layouts(match) == (BHSD, BSHD, BSHD, BSHD) and match.q.name == turned


def test_output_that_leaves_heads_first(tmp_path, rng):
    g, s = Graph(), Sizes()
    q, k, v = qkv(g, s)
    kt = g.add("Transpose", heads_first(g, k, 4, 8), perm=[0, 1, 3, 2])
    probs = g.add("Softmax", g.add("MatMul", heads_first(g, q, 4, 8), kt), axis=-1)
    out = g.add("MatMul", probs, heads_first(g, v, 4, 8))
    g.output(out, g.add("Relu", out))
    match = matched(g, tmp_path, rng)
    assert match.o_layout is BHSD and match.output.name == out


def test_output_flattened_to_rank_2_keeps_the_last_rank_3_tensor(tmp_path, rng):
    g = Graph()
    out = attention(g)
    g.outputs.clear()
    g.output(g.add("Reshape", out, g.ints(-1, 32)))
    match = matched(g, tmp_path, rng)
    assert match.output.name == out and match.o_layout is BSHD


def test_output_flattened_to_rank_2_at_once(tmp_path, rng):
    g, s = Graph(), Sizes()
    q, k, v = qkv(g, s)
    kt = g.add("Transpose", heads_first(g, k, 4, 8), perm=[0, 1, 3, 2])
    probs = g.add("Softmax", g.add("MatMul", heads_first(g, q, 4, 8), kt), axis=-1)
    out = g.add("Transpose", g.add("MatMul", probs, heads_first(g, v, 4, 8)), perm=[0, 2, 1, 3])
    flat = g.add("Reshape", out, g.ints(-1, 32))
    g.output(flat)
    match = matched(g, tmp_path, rng)
    assert (match.output.name, match.o_layout, match.output_rank) == (flat, BSHD, 2)


def test_scaled_values_are_taken_after_the_scale(tmp_path, rng):
    g, s = Graph(), Sizes()
    q, k, v = qkv(g, s)
    vh = g.add("Mul", heads_first(g, v, 4, 8), g.const(3.0))
    kt = g.add("Transpose", heads_first(g, k, 4, 8), perm=[0, 1, 3, 2])
    finish(g, s, g.add("MatMul", heads_first(g, q, 4, 8), kt), vh)
    assert matched(g, tmp_path, rng).v.name == vh


def test_cross_attention(tmp_path, rng):
    g = Graph()
    attention(g, Sizes(seq_q=5, seq_kv=13))
    match = matched(g, tmp_path, rng)
    assert (match.seq_q, match.seq_kv) == (5, 13)


def test_dynamic_batch_and_sequence(tmp_path, rng):
    g = Graph()
    attention(g, Sizes(batch="batch", seq_q="seq", seq_kv="seq"))
    model = g.model()
    found = find(model, tmp_path)
    match = found.only
    assert match.dynamic_seq and match.seq_q == 0
    for batch, seq in ((1, 1), (3, 7), (4, 4)):
        check(found, feeds(model, rng, batch=batch, seq=seq))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_casts_around_the_softmax(dtype, tmp_path, rng):
    g, s = Graph(), Sizes(dtype=dtype)
    kind = {np.float16: 10, np.float32: 1}[dtype]
    attention(
        g,
        s,
        terms=lambda g, x: g.add("Cast", x, to=1),
        probabilities=lambda g, x: g.add("Dropout", g.add("Identity", g.add("Cast", x, to=kind))),
    )
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.dtype == np.dtype(dtype)
    check(found, feeds(model, rng), rtol=5e-3 if dtype is np.float16 else 2e-5, atol=5e-3)


def test_queries_and_keys_widened_before_the_product(tmp_path, rng):
    """Scores in float32 from float16 inputs, probabilities back in float16: an attention in float16."""
    g, s = Graph(), Sizes(dtype=np.float16)
    q, k, v = qkv(g, s)
    qh, kh = (g.add("Cast", heads_first(g, x, 4, 8), to=1) for x in (q, k))
    probs = g.add("Softmax", g.add("MatMul", qh, g.add("Transpose", kh, perm=[0, 1, 3, 2])), axis=-1)
    out = g.add("MatMul", g.add("Cast", probs, to=10), heads_first(g, v, 4, 8))
    g.output(heads_last(g, out, 4, 8))
    model = g.model()
    found = find(model, tmp_path)
    assert found.only.dtype == np.float16 and found.only.q.name == "q"
    check(found, feeds(model, rng), rtol=5e-3, atol=5e-3)


def test_softcap(tmp_path, rng):
    g = Graph()

    def cap(g: Graph, x: str) -> str:
        return g.add("Mul", g.add("Tanh", g.add("Div", x, g.const(2.0))), g.const(2.0))

    attention(g, terms=cap)
    match = matched(g, tmp_path, rng)
    assert match.softcap == 2.0 and match.scale == 0.25


def test_softcap_after_a_mask_is_refused(tmp_path):
    g = Graph()

    def cap(g: Graph, x: str) -> str:
        masked = g.add("Add", x, g.const(np.triu(np.full((9, 9), -1e9), 1)))
        return g.add("Mul", g.add("Tanh", g.add("Div", masked, g.const(2.0))), g.const(2.0))

    attention(g, terms=cap)
    refusal = find(g.model(), tmp_path).refused
    assert "softcap after a mask" in refusal.reason and "Tanh" in refusal.nodes[0]


def test_training_dropout_is_refused(tmp_path):
    g = Graph()
    attention(g, probabilities=lambda g, x: g.add("Dropout", x, g.const(0.1), g.const(True)))
    refusal = find(g.model(), tmp_path).refused
    assert "Dropout in training mode" in refusal.reason and "Dropout" in refusal.nodes[0]


def test_probabilities_that_are_an_output_are_refused(tmp_path):
    g = Graph()
    attention(g)
    g.output(next(n.output[0] for n in g.nodes if n.op_type == "Softmax"))
    assert "output of the graph" in find(g.model(), tmp_path).refused.reason


def test_probabilities_with_another_consumer_are_refused(tmp_path):
    g = Graph()
    attention(g)
    g.output(g.add("ReduceMax", next(n.output[0] for n in g.nodes if n.op_type == "Softmax")))
    refusal = find(g.model(), tmp_path).refused
    assert "another consumer" in refusal.reason and "ReduceMax" in refusal.nodes[0]


def test_scores_with_another_consumer_are_refused(tmp_path):
    g = Graph()
    attention(g)
    g.output(g.add("ReduceMax", next(n.output[0] for n in g.nodes if n.op_type == "Mul")))
    refusal = find(g.model(), tmp_path).refused
    assert "scores have another consumer" in refusal.reason and "ReduceMax" in refusal.nodes[0]


def test_softmax_over_queries_is_refused(tmp_path):
    g, s = Graph(), Sizes()
    q, k, v = qkv(g, s)
    kt = g.add("Transpose", heads_first(g, k, 4, 8), perm=[0, 1, 3, 2])
    probs = g.add("Softmax", g.add("MatMul", heads_first(g, q, 4, 8), kt), axis=2)
    g.output(heads_last(g, g.add("MatMul", probs, heads_first(g, v, 4, 8)), 4, 8))
    assert "not over the keys" in find(g.model(), tmp_path).refused.reason


def test_one_query_is_left_to_the_runtime(tmp_path):
    g = Graph()
    attention(g, Sizes(seq_q=1, seq_kv=9))
    assert "decoding" in find(g.model(), tmp_path).refused.reason


def test_a_classifier_and_a_router_are_no_attention(tmp_path):
    g = Graph()
    x = g.input("x", [2, 9, 32])
    gate = g.add("Softmax", g.add("MatMul", x, g.const(np.ones((32, 4)))), axis=-1)
    g.output(g.add("MatMul", gate, g.add("Reshape", x, g.ints(2, 4, 72))))
    g.output(g.add("Softmax", g.add("Gemm", g.add("Flatten", x), g.const(np.ones((288, 3)))), axis=-1))
    found = find(g.model(), tmp_path)
    assert not found.matches and not found.refusals


def test_double_precision_is_refused(tmp_path):
    g, s = Graph(), Sizes(dtype=np.float64)
    q, k, v = qkv(g, s)
    kt = g.add("Transpose", heads_first(g, k, 4, 8), perm=[0, 1, 3, 2])
    probs = g.add("Softmax", g.add("MatMul", heads_first(g, q, 4, 8), kt), axis=-1)
    g.output(heads_last(g, g.add("MatMul", probs, heads_first(g, v, 4, 8)), 4, 8))
    assert "float64" in find(g.model(), tmp_path).refused.reason
