"""The tables of searched plans."""

from __future__ import annotations

import json

from benchmarks import fusion_plans_table
from benchmarks.fusion_plans_table import table


def search(model: str, **more: object) -> dict[str, object]:
    return {
        "model": model,
        "B": 16,
        "S": 2048,
        "commit": "abc",
        "timer": "GPU",
        "samples": 20,
        "cached": 0,
        "complete": True,
        "seconds": 4.06,
        "builds": 12,
        "build_seconds": 80.4,
        "regions": [
            ["norm", "Add+Norm", "b1", 27.25, 38.0, True, "", 1],
            ["norm", "Add+Norm", "b1", 27.25, 38.0, True, "", 11],
            ["gemm", "MatMul+Add", "w", 50.0, 70.0, True, "", 1],
            ["gemm", "MatMul", "w", 50.0, 20.0, False, "", 1],
        ],
        "blocks": [["h", "0", 11, 900.0, 700.0], ["i", "0", 1, 100.0, 100.0]],
        **more,
    }


ENGINES = {
    "model": "a",
    "commit": "abc",
    "B": 16,
    "S": 2048,
    "attention_ms": 2.5,
    "initial_ms": 2.1,
    "searched_ms": 2.0,
}


def test_a_row_a_model_and_a_row_a_region_that_is_kept():
    rows = table([search("a", again_s=3.94, again_samples=0), ENGINES | {"err_searched": 0.0021}]).splitlines()
    wanted = "| a | 16,2048 | 20 | 4.1 | 12 | 80 | 3.9 | 10.000, 7.800 | 2.5 | 2.1 | 2 | 1.250 | 2.1e-03 |"
    assert wanted in rows
    regions = [row for row in rows if row.startswith("| a | ") and row != wanted]
    assert regions == ["| a | Add, Norm | b1 | 12 | 27.2 | 38.0 |", "| a | MatMul, Add | w | 1 | 50.0 | 70.0 |"]
    assert "Geometric mean of attention / searched over these 1: 1.250." in rows and rows[-1] == "GPU. Commit abc."


def test_the_newest_lines_count_and_engines_may_be_missing():
    lines = [
        search("a"),
        ENGINES,
        search("b", complete=False, cached=3, again_s=9.0, again_samples=7),
        search("a", samples=21),
        ENGINES,
    ]
    text = table([*lines, ENGINES | {"searched_ms": None}])
    assert "| a | 16,2048 | 21 |" in text and "| a | 16,2048 | 20 |" not in text
    assert (
        "| b | 16,2048 | 20 (3 more known), interrupted | 4.1 | 12 | 80 | – | 10.000, 7.800 | – | – | – | – | – |"
        in text
    )
    assert "Geometric mean" not in text


def test_engines_of_a_plan_of_another_run():
    assert "| a | 16,2048 | a plan of another run | – | – | – | – | – | 2.5 | 2.1 | 2 | 1.250 | – |" in table([ENGINES])


def test_it_writes_between_the_marks(tmp_path, monkeypatch):
    page, results, added = tmp_path / "page.md", tmp_path / "results.jsonl", tmp_path / "added.jsonl"
    page.write_text(f"above\n{fusion_plans_table.BEGIN}\nold\n{fusion_plans_table.END}\nbelow\n", encoding="utf-8")
    added.write_text(json.dumps(search("a")) + "\n", encoding="utf-8")
    monkeypatch.setattr(fusion_plans_table, "PAGE", page)
    monkeypatch.setattr(fusion_plans_table, "RESULTS", results)
    fusion_plans_table.main(["--add", str(added)])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "old" not in text and "| a | 16,2048 |" in text
    assert len(results.read_text(encoding="utf-8").splitlines()) == 1
