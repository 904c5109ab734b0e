"""The table of searches says what the lines say."""

from __future__ import annotations

from typing import Any

from benchmarks.attention_bench.record import load
from benchmarks.fusion_search_table import BEGIN, END, PAGE, RESULTS, table


def _line(search: str, seed: int | None, measurements: int, over: float, **more: Any) -> dict[str, Any]:
    about = {"date": "2026-12-01T00:00:00+00:00", "commit": "abc", "timer": "a GPU", "model": "m", "blocks": 2}
    return (
        about | {"search": search, "seed": seed, "measurements": measurements, "over_best": over, "seconds": 2.0} | more
    )


def test_a_row_is_of_the_newest_lines() -> None:
    lines = [
        {"search": "exhaustive", "block": "of earlier runs", "date": "2027", "seed": None},
        _line("two-stage", 0, 90, 1.5),
        _line("exhaustive", None, 100, 1.0),
        _line("two-stage", 0, 20, 1.001),
        _line("two-stage", 1, 25, 1.02),
        _line("random", 0, 20, 1.5, within=70),
        _line("random", 1, 25, 1.25, within=80),
    ]
    text = table(lines)
    assert "| m | 1 | 100 | 20–25 | 1/4.0 | 0.1–2.0 % | 2.0 | 25.0–50.0 % | 75 |" in text
    assert "1: a GPU." in text and "Commit abc, 2026-12-01." in text and "2027" not in text
    lines[-1]["within"] = None
    assert "not by all seeds" in table(lines)


def test_the_page_holds_the_table_of_the_results() -> None:
    page = PAGE.read_text()
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == table(load(RESULTS))
