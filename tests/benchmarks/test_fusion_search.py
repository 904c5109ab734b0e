"""The comparison of searches: the same times for all, the best of all choices by exhaustive search."""

from __future__ import annotations

import json
from itertools import chain, combinations
from pathlib import Path

import pytest
from stof_onnx.errors import StofError
from stof_onnx.fusion.piece_model import piece_key
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.templates import GEMM_TEMPLATES

from benchmarks.fusion_bench.baselines import exhaustive, possible_pieces, price_of_pieces
from benchmarks.fusion_bench.table import Table, read_tables
from benchmarks.fusion_search import compare, draws
from tests.fusion.synthetic import CONFIGS, Synthetic, layer_block


def test_exhaustive_search_is_exhaustive() -> None:
    """Against every set of regions that do not overlap, one by one."""
    block = layer_block()
    space = BlockSpace(block, Ledger(Synthetic(3)))
    best, choice = exhaustive(space)
    spans = [s for s in space.regions if s[1] <= 11]  # two GEMMs of three: few enough sets
    sets = chain.from_iterable(combinations(spans, n) for n in range(5))
    apart = [s for s in sets if all(a[1] <= b[0] or b[1] <= a[0] for a, b in combinations(s, 2))]
    rest = {span: region for span, region in choice.items() if span[0] >= 11}
    assert min(space.total({s: space.regions[s] for s in some} | rest) for some in apart) == best
    assert space.total(choice) == best


def test_all_searches_see_the_same_times() -> None:
    timer = Synthetic(1)
    blocks = [layer_block(), layer_block(width=64), layer_block()]
    lines = list(compare(blocks, Table(timer.name, timer), "fp16"))
    assert max(timer.asked.values()) == 1, "nothing is measured twice"
    assert [line["search"] for line in lines] == ["exhaustive", *["two-stage", "random"] * 5]
    assert all(line["over_best"] >= 1.0 for line in lines)
    everything = lines[0]
    assert everything["measurements"] == len(timer.asked) and everything["blocks"] == 2
    assert everything["seconds"] == pytest.approx(timer.seconds * len(timer.asked))
    for two, drawn in zip(lines[1::2], lines[2::2], strict=True):
        assert two["measurements"] < everything["measurements"] and two["seed"] == drawn["seed"]
        assert two["over_best"] < 1.05
        assert drawn["within"] is None or drawn["within"] >= 2
    json.dumps(lines)


def test_a_table_is_replayed_as_it_was_measured(tmp_path: Path) -> None:
    """Without the timer, the same lines again; a table that lacks a time says which."""
    block, file = layer_block(), tmp_path / "times.jsonl"
    timer = Synthetic(1)
    lines = list(compare([block], Table(timer.name, timer, file=file), "fp16"))
    (table,) = read_tables(file).values()
    assert table.timer is None and len(table.times) == len(timer.asked)
    again = list(compare([block], table, "fp16"))
    assert again[0]["regions"] == lines[0]["regions"] and again[1]["measurements"] == lines[1]["measurements"]
    file.write_text("".join(file.read_text().splitlines(True)[:-1]))
    (part,) = read_tables(file).values()
    with pytest.raises(StofError, match="no time of"):
        list(compare([block], part, "fp16"))


def test_draws_are_of_the_tables_times() -> None:
    """Off by nothing all draws are the search on the table; off by much they differ, and the table stays as it is."""
    block, timer = layer_block(), Synthetic(1)
    table = Table(timer.name, timer)
    two = [line for line in compare([block], table, "fp16") if line["search"] == "two-stage"]
    before = dict(table.times)
    exact = list(draws([block], table, "fp16", 0.0))
    assert exact[0]["us"] == two[0]["us"] and exact[0]["measurements"] == two[0]["measurements"]
    others = list(draws([block], table, "fp16", 0.2))
    assert len({line["us"] for line in others}) == len(others)
    assert all(line["over_best"] >= 1.0 for line in others)
    assert table.times == before


def test_a_table_offers_as_many_programs_as_the_search_has() -> None:
    timer = Synthetic(1)
    regions = BlockSpace(layer_block(), Ledger(timer)).regions.values()
    table = Table(timer.name, timer, programs=2)
    for region in regions:
        assert len(table.configs(region)) == (len(CONFIGS) if region.instance.template in GEMM_TEMPLATES else 2)


def test_the_pieces_of_a_space_are_those_that_are_timed() -> None:
    """And none is cheaper than the best choice."""
    space = BlockSpace(layer_block(), Ledger(Synthetic(4)))
    best, _ = exhaustive(space)
    pieces = [key for key, config in space.ledger.times if not config]
    prices = price_of_pieces(space)
    assert {piece_key(space.segment(span)) for span in possible_pieces(space)} == set(pieces)
    assert set(prices) == set(possible_pieces(space)) and min(prices.values()) >= best
