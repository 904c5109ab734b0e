"""The grid of real exports: every site replaced by what its exporter declares, or left alone for a known reason."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from stof_models.grid import EXPORTS, GridCase, grid, subset

from tests.grid.conftest import PROPERTY
from tests.grid.outcome import evaluate

CASES = subset(40)  # `python -m tests.grid.run` runs the whole grid


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: GridCase, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    outcome = evaluate(case, tmp_path)
    record_property(PROPERTY, json.dumps(outcome.to_json()))
    assert not outcome.errors
    for site in outcome.sites:
        if site.status == "refused":
            assert site.reason, site.name


def test_the_grid_covers_all_pairs() -> None:
    """Independent of how the grid was made: all pairs that some valid export has."""
    cases = grid()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    fields = ("family", "attention", "mask", "padding", "dynamic", "dtype")
    rows = [[getattr(case.options, f) for f in fields] + [case.options.opset] for case in cases]
    seen = {(i, j, row[i], row[j]) for row in rows for i, j in combinations(range(len(row)), 2)}
    families = {row[0] for row in rows}
    masks = {row[2] for row in rows}
    assert len(families) == 13
    assert len(masks) == 12
    assert {row[-1] for row in rows} == {opset for _, opset in EXPORTS}
    for family in families - {"swin"}:
        for mask in masks:
            assert (0, 2, family, mask) in seen
    for family in families - {"swin", "vit"}:
        for dynamic in ("none", "batch", "sequence"):
            assert (0, 4, family, dynamic) in seen
        assert (0, 3, family, True) in seen
    for mask in masks:
        for opset in (17, 18, 23):
            assert (2, 6, mask, opset) in seen


def test_the_subset_covers_every_choice() -> None:
    fields = (
        "family",
        "exporter",
        "opset",
        "attention",
        "mask",
        "mask_style",
        "cross_mask",
        "padding",
        "dynamic",
        "dtype",
    )
    for name in fields:
        found = {getattr(case.options, name) for case in CASES}
        assert found == {getattr(case.options, name) for case in grid()}, name
