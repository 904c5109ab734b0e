"""The row programs' table: the newest line of a case, with what earlier runs know of its peers."""

from __future__ import annotations

from typing import Any

from benchmarks.row_programs_table import newest, table


def line(case: str, us: float, **peers: float) -> dict[str, Any]:
    return {
        "date": "2026-11-30 22:00",
        "commit": "abc",
        "gpu": "NVIDIA H200",
        "driver": "580",
        "torch": "2.11",
        "case": case,
        "bytes": 43_000_000,
        "us": {"b256r4w4": us, "b512r1w2": us + 1},
        "default": "b512r1w2",
        "peers": peers,
        "error": 2e-4,
    }


def test_the_newest_line_counts_and_peers_stay() -> None:
    lines = [
        line("a", 30.0, torch=60.0, **{"torch.compile": 33.0}),
        line("b", 5.0, torch=9.0),
        line("a", 20.0, torch=50.0),
    ]
    kept = newest(lines)
    assert [x["case"] for x in kept] == ["a", "b"] and kept[0]["us"]["b256r4w4"] == 20.0
    text = table(kept).splitlines()
    assert text[2] == "| a | 20.0 | b256r4w4 | 21.0 | 10.0 | 50.0 | 33.0 | 2.0e-04 |"
    assert text[3] == "| b | 5.0 | b256r4w4 | 6.0 | 10.0 | 9.0 | – | 2.0e-04 |"
    assert text[-1].startswith("NVIDIA H200") and "commit abc" in text[-1]
