"""The mask zoo against its definitions, written out element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_models.masks import KINDS, PREFIX_STABLE, MaskSpec, make_mask


def _slow(mask: MaskSpec, q: int, k: int, head: int) -> bool:
    """One element, from the definitions in the module's docstring (random parts excepted)."""
    distance = abs(q - k)
    kind = ("window", "dilated", "longformer", "random")[head % 4] if mask.kind == "per-head" else mask.kind
    segments = np.cumsum(mask.segments)
    rules = {
        "none": lambda: True,
        "causal": lambda: k <= q,
        "causal-br": lambda: k <= q + mask.seq_kv - mask.seq_q,
        "window": lambda: distance <= mask.width,
        "causal-window": lambda: 0 <= q - k <= mask.width,
        "dilated": lambda: distance <= mask.width * mask.dilation and distance % mask.dilation == 0,
        "longformer": lambda: distance <= mask.width or q < mask.global_tokens or k < mask.global_tokens,
        "block-diagonal": lambda: not any(min(q, k) < end <= max(q, k) for end in segments),
        "prefix-lm": lambda: k <= q or k < mask.prefix,
    }
    return rules[kind]() and (k <= q or not mask.causal)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"random", "bigbird"}))
@given(seq_q=st.integers(8, 40), seq_kv=st.integers(8, 40), causal=st.booleans())
def test_elements(kind: str, seq_q: int, seq_kv: int, causal: bool) -> None:
    mask = make_mask(kind, seq_q, seq_kv, heads=5, causal=causal)
    dense = mask.dense()
    dense = dense if mask.per_head else dense[None]
    assert dense.dtype == np.bool_
    assert dense.shape == (5 if mask.per_head else 1, seq_q, seq_kv)
    for head in range(len(dense)):
        if mask.per_head and head % 4 == 3:
            continue  # random
        expected = [[_slow(mask, q, k, head) for k in range(seq_kv)] for q in range(seq_q)]
        assert np.array_equal(dense[head], expected)


@pytest.mark.parametrize(("size", "block"), [(512, 64), (1000, 64), (96, 12)])
def test_bigbird(size: int, block: int) -> None:
    dense = make_mask("bigbird", size, block=block).dense()
    blocks = -(-size // block)
    by_block = dense[::block, ::block]
    assert np.array_equal(dense, np.kron(by_block, np.ones((block, block), bool))[:size, :size])
    index = np.arange(blocks)
    required = np.abs(index[:, None] - index) <= 1
    required[[0, -1]] = required[:, [0, -1]] = True
    assert by_block[required].all()
    extra = (by_block & ~required).sum(axis=1)
    assert extra.max() <= 3
    assert extra.sum() > 0


def test_random_density_and_diagonal() -> None:
    dense = make_mask("random", 1024, seed=3).dense()
    assert dense.diagonal().all()
    assert abs(dense.mean() - 0.1) < 0.003
    assert abs(dense[:, :64].mean() - 0.1) < 0.02
    other = make_mask("random", 1024, seed=4).dense()
    assert abs((dense & other).mean() - 0.01) < 0.003  # seeds are independent


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_bands_are_rows_of_the_whole(kind: str, data: st.DataObject) -> None:
    mask = make_mask(kind, data.draw(st.integers(8, 60)), data.draw(st.integers(8, 60)), heads=3, seed=1)
    q0 = data.draw(st.integers(0, mask.seq_q))
    q1 = data.draw(st.integers(q0, mask.seq_q))
    assert np.array_equal(mask.rows(q0, q1), mask.dense()[..., q0:q1, :])


@pytest.mark.parametrize("kind", sorted(PREFIX_STABLE))
def test_prefix_stable_kinds(kind: str) -> None:
    from dataclasses import replace

    large = make_mask(kind, 80, heads=4)
    small = replace(large, seq_q=50, seq_kv=50)
    assert np.array_equal(small.dense(), large.dense(50, 50))


@pytest.mark.parametrize("kind", KINDS)
def test_json(kind: str) -> None:
    import json

    mask = make_mask(kind, 64, 96, heads=4, causal=True, seed=7)
    assert MaskSpec.from_dict(json.loads(json.dumps(mask.to_dict()))) == mask


def test_widths_of_the_paper() -> None:
    assert make_mask("window", 4096).width == 64
    assert make_mask("window", 1024).width == 32
    assert make_mask("window", 64).width == 8
    assert make_mask("bigbird", 4096).block == 64
    density = {kind: make_mask(kind, 1024).dense().mean() for kind in ("causal", "window", "longformer")}
    assert density["causal"] == pytest.approx(0.5, abs=0.01)
    assert density["window"] == pytest.approx(0.062, abs=0.003)
    assert density["longformer"] == pytest.approx(0.112, abs=0.015)


def test_huge_masks_by_bands() -> None:
    """A band of a mask that would take 16 GiB whole."""
    band = make_mask("bigbird", 131072).rows(70000, 70064)
    assert band.shape == (64, 131072)
    assert band[:, :64].all()


def test_bad_masks() -> None:
    with pytest.raises(ValueError, match="unknown mask"):
        make_mask("triangle", 8)
    with pytest.raises(ValueError, match="at least one row"):
        make_mask("causal", 0)
    with pytest.raises(ValueError, match="rows"):
        make_mask("causal", 8).rows(4, 9)
