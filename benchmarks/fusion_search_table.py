"""The search's table of docs/benchmarks.md, from benchmarks/results/fusion_search.jsonl.

    python -m benchmarks.fusion_search_table

A row a model and timer, of the newest run of benchmarks/fusion_search.py; the file's first lines, which are of one kind
of block each, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.attention_bench.record import ROOT, load

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "fusion_search.jsonl", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- fusion search table: begin -->", "<!-- fusion search table: end -->"

Line = dict[str, Any]


def newest(lines: Iterable[Line]) -> dict[tuple[str, str], dict[str, list[Line]]]:
    """The last lines of each seed, by model and timer, then by search."""
    last: dict[tuple[str, str, str, int | None], Line] = {}
    for line in lines:
        if "blocks" in line:
            last[line["model"], line["timer"], line["search"], line["seed"]] = line
    found: dict[tuple[str, str], dict[str, list[Line]]] = {}
    for (model, timer, search, _), line in last.items():
        found.setdefault((model, timer), {}).setdefault(search, []).append(line)
    return found


def table(lines: Iterable[Line]) -> str:
    """Markdown: measured times first."""
    found = newest(lines)
    rows = [
        "| model | times | measurements, exhaustive | two-stage | share | over the best | measuring, s "
        "| random with as many, over the best | random, measurements until 2 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    timers: dict[str, None] = {}
    for (model, timer), searches in sorted(
        found.items(), key=lambda item: (item[0][1].startswith("roofline"), item[0])
    ):
        timers[timer] = None
        rows.append(_row(model, list(timers).index(timer) + 1, searches))
    notes = [f"{number}: {timer}." for number, timer in enumerate(timers, 1)]
    newest_line = max((s for searches in found.values() for s in searches["exhaustive"]), key=lambda s: s["date"])
    return "\n".join([*rows, "", *notes, f"Commit {newest_line['commit']}, {newest_line['date'][:10]}."])


def _row(model: str, timer: int, searches: dict[str, list[Line]]) -> str:
    (everything,), mine, drawn = searches["exhaustive"], searches["two-stage"], searches["random"]
    count = max(line["measurements"] for line in mine)
    needed = [line["within"] for line in drawn]
    reached = f"{median(needed):.0f}" if None not in needed else "not by all seeds"
    cells = [
        model,
        str(timer),
        str(everything["measurements"]),
        _range([line["measurements"] for line in mine], "d"),
        f"1/{everything['measurements'] / count:.1f}",
        _percent(mine),
        _range([line["seconds"] for line in mine], ".1f") if everything["seconds"] else "–",
        _percent(drawn),
        reached,
    ]
    return f"| {' | '.join(cells)} |"


def _percent(lines: Sequence[Line]) -> str:
    return _range([100 * (line["over_best"] - 1) for line in lines], ".1f") + " %"


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}–{high}"


def main() -> None:
    """Writes the table into the page."""
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table(load(RESULTS))}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
