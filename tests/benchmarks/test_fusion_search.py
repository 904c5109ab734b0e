"""The comparison of searches: the same times for all, the best of all choices by exhaustive search."""

from __future__ import annotations

import json
from itertools import chain, combinations

from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import Ledger

from benchmarks.fusion_bench.baselines import exhaustive
from benchmarks.fusion_search import Table, compare
from tests.fusion.synthetic import Synthetic, layer_block


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
    lines = list(compare(layer_block(), Table(timer), "fp16"))
    assert max(timer.asked.values()) == 1, "nothing is measured twice"
    assert [line["search"] for line in lines] == ["exhaustive", *["two-stage", "random"] * 5]
    assert all(line["over_best"] >= 1.0 for line in lines)
    everything = lines[0]["measurements"]
    for two, drawn in zip(lines[1::2], lines[2::2], strict=True):
        assert two["measurements"] < everything and two["seed"] == drawn["seed"]
        assert two["over_best"] < 1.05
    json.dumps(lines)
