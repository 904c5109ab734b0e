"""Measuring a whole space: what is timed, in which order, and what a time limit leaves."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
from stof_onnx.fusion.piece_model import piece_key
from stof_onnx.fusion.search import Measurement
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import Block

from benchmarks import fusion_space
from benchmarks.fusion_bench.baselines import exhaustive, possible_pieces, price_of_pieces
from benchmarks.fusion_bench.table import Table
from tests.fusion.synthetic import Synthetic, layer_block


@pytest.fixture(scope="module")
def block() -> Block:
    return layer_block()


def test_regions_and_pieces_of_the_order_are_all_that_exhaustive_search_asks_for(block: Block) -> None:
    timer = Synthetic(3)
    table = Table(timer.name, timer)
    fusion_space._fused([block], table)
    for _, number, span in fusion_space._order([block], table):
        assert number == 0
        table.left(Segment(block, *span))
    table.timer = None  # raises where a time is missing
    found, _ = exhaustive(BlockSpace(block, Ledger(table)))
    assert found == exhaustive(BlockSpace(block, Ledger(Synthetic(3))))[0]
    assert not fusion_space._order([block], table)


def test_pieces_of_good_choices_by_estimates_come_first_and_known_ones_not_at_all(block: Block) -> None:
    space, table = BlockSpace(block, Ledger(Roofline())), Table("roofline")
    prices = price_of_pieces(space)
    order = fusion_space._order([block], table)
    assert len(order) == len({piece_key(Segment(block, *span)) for span in possible_pieces(space)})
    assert [prices[span] for _, _, span in order] == sorted(prices[span] for _, _, span in order)
    table.keep((order[0][0], ""), Measurement(1.0))
    assert fusion_space._order([block], table) == order[1:]


def test_engines_are_waited_for_until_the_time_is_up() -> None:
    done, never = Future(), Future()  # type: ignore[var-annotated]
    done.set_result((b"", 0.0, ""))
    begun = time.monotonic()
    assert list(fusion_space._ended([never, done], begun + 0.2)) == [done]
    assert 0.2 <= time.monotonic() - begun < 5
