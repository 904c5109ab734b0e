"""The attention benchmark's CPU side: the same mask everywhere, and every case in exactly one part."""

from __future__ import annotations

import argparse
import time

import numpy as np
import pytest
from stof_onnx.mask import decode_one, encode_bands

from benchmarks import attention
from benchmarks.attention_bench import cases
from benchmarks.attention_bench.gate import Gate, time_box
from benchmarks.attention_bench.masks import MASKS


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("seq", [64, 330, 1024])
def test_streamed_rows_are_the_predicate(name, seq):
    mask, at = MASKS[name](seq), np.arange(seq)
    expected = np.broadcast_to(mask.allowed(at[:, None], at[None]), (seq, seq))
    bands = mask.bands(seq)
    assert np.array_equal(decode_one(encode_bands(bands, seq, seq)), expected)
    q0, q1 = seq // 3, seq // 3 + seq // 2  # neither a tile's nor a block's edge
    assert np.array_equal(bands(q0, q1), expected[q0:q1])


@pytest.mark.parametrize("name", ["causal", "window", "longformer", "bigbird", "random", "paper_bigbird"])
@pytest.mark.parametrize("tile", [(128, 128), (64, 64), (128, 64)])
def test_peers_get_the_lists_of_create_block_mask(name, tile, monkeypatch):
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import create_block_mask

    from benchmarks.attention_bench import peers

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    seq, mask = 512, MASKS[name](512)
    allowed = mask.on("cpu")
    expected = create_block_mask(lambda b, h, q, k: allowed(q, k), None, None, seq, seq, device="cpu", BLOCK_SIZE=tile)
    lists = peers.block_lists(encode_bands(mask.bands(seq), seq, seq), *tile)
    for kind, counts, columns in (
        ("part", expected.kv_num_blocks, expected.kv_indices),
        ("full", expected.full_kv_num_blocks, expected.full_kv_indices),
    ):
        assert torch.equal(lists[f"{kind}_counts"], counts)
        listed = torch.arange(columns.shape[-1]) < counts[..., None]
        assert torch.equal(lists[f"{kind}_columns"][listed], columns[listed])


def asked(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**({"case": [], "set": [], "part": "1/1"} | changes))


def test_parts_hold_every_case_once():
    whole = attention.chosen(asked(set=["anchors", "paper", "long"]))
    parts = [attention.chosen(asked(set=["anchors", "paper", "long"], part=f"{i}/4")) for i in range(1, 5)]
    assert len(whole) == len({c.key for c in [*cases.ANCHORS, *cases.PAPER, *cases.LONG]})
    assert sorted(c.key for part in parts for c in part) == sorted(c.key for c in whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "-1/2"])
def test_a_part_that_does_not_exist(part):
    with pytest.raises(SystemExit, match="--part"):
        attention.chosen(asked(part=part))


def test_gate_is_left_for_others_only_while_compiling(tmp_path):
    first, second = Gate(), Gate()  # separate descriptors: as two processes
    for one in (first, second):
        one.use(tmp_path / "gate")
    with first.held():
        with pytest.raises(TimeoutError), time_box(0.2):
            second._lock()
        with first.left(), time_box(2.0), second.held():
            pass
        with pytest.raises(TimeoutError), time_box(0.2):
            second._lock()
    with time_box(2.0), second.held(), second.left(), first.held():
        pass


def test_time_box():
    with pytest.raises(TimeoutError, match=r"0\.05 s"), time_box(0.05):
        time.sleep(2)
    with time_box(0.0):
        time.sleep(0.01)
