"""The tables of searched plans in docs/benchmarks.md, from benchmarks/results/fusion_plans.jsonl.

    python -m benchmarks.fusion_plans_table [--add FILE ...]

`--add` appends the lines of files that another machine wrote. The newest search and the newest engines of a model
count.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention_bench.record import ROOT, load

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "fusion_plans.jsonl", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- fusion plans table: begin -->", "<!-- fusion plans table: end -->"

Line = dict[str, Any]


def newest(lines: Iterable[Line]) -> list[tuple[Line, Line]]:
    """The last search of each model and size, in order of first appearance, and the last engines; {} for none."""
    searches: dict[tuple[str, int, int], Line] = {}
    engines: dict[tuple[str, int, int], Line] = {}
    for line in lines:
        (searches if "regions" in line else engines)[line["model"], line["B"], line["S"]] = line
    return [(searches.get(key, {}), engines.get(key, {})) for key in {**searches, **engines}]


def table(lines: Iterable[Line]) -> str:
    """Markdown: a row a model, then a row each kind of region that a plan keeps."""
    found = newest(lines)
    rows = [
        "| model | B,S | measurements | measuring, s | engines built | building, s | again, s "
        "| between attentions, ms: TensorRT, planned "
        "| attention only, ms | initial plan | searched plan | attention / searched | rel. error |",
        "|" + "---|" * 13,
        *(_model(search, engines) for search, engines in found),
        "",
    ]
    gains = [engines["attention_ms"] / engines["searched_ms"] for _, engines in found if _timed(engines)]
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        rows += [f"Geometric mean of attention / searched over these {len(gains)}: {mean:.3f}.", ""]
    rows += [
        "| model | region | configuration | in the model | fused, µs | left to TensorRT, µs |",
        "|" + "---|" * 6,
        *(row for search, _ in found if search for row in _regions(search)),
        "",
    ]
    timers = {search["timer"] for search, _ in found if search}
    commits = {line["commit"] for pair in found for line in pair if line}
    return "\n".join([*rows, f"{'; '.join(sorted(timers))}. Commit {', '.join(sorted(commits))}."])


def _model(search: Line, engines: Line) -> str:
    about = search or engines
    cells = [
        about["model"],
        f"{about['B']},{about['S']}",
        *(_searched(search) if search else ["a plan of another run", *"–––––"]),
        *(_ms(engines.get(name)) for name in ("attention_ms", "initial_ms", "searched_ms")),
        f"{engines['attention_ms'] / engines['searched_ms']:.3f}" if _timed(engines) else "–",
        f"{engines['err_searched']:.1e}" if engines.get("err_searched") is not None else "–",
    ]
    return f"| {' | '.join(cells)} |"


def _searched(search: Line) -> list[str]:
    blocks = [block for block in search["blocks"] if None not in block[3:]]
    left, planned = (sum(block[2] * block[at] for block in blocks) / 1e3 for at in (3, 4))
    asked = str(search["samples"]) + (f" ({search['cached']} more known)" if search["cached"] else "")
    return [
        asked + ("" if search["complete"] else ", interrupted"),
        f"{search['seconds']:.1f}",
        str(search["builds"]),
        f"{search['build_seconds']:.0f}",
        f"{search['again_s']:.1f}" if search.get("again_samples") == 0 else "–",
        f"{left:.3f}, {planned:.3f}",
    ]


def _regions(search: Line) -> list[str]:
    """What a plan keeps: equal regions of different blocks together, the most costly first."""
    counts: dict[tuple[str, str, float, float | None], int] = {}
    for _, operators, config, fused, left, kept, _, count in search["regions"]:
        if kept:
            key = operators.replace("+", ", "), config, fused, left
            counts[key] = counts.get(key, 0) + count
    ordered = sorted(counts.items(), key=lambda item: -item[0][2] * item[1])
    return [
        f"| {search['model']} | {operators} | {config} | {count} | {fused:.1f} | {_us(left)} |"
        for (operators, config, fused, left), count in ordered
    ]


def _timed(engines: Line) -> bool:
    return bool(engines.get("attention_ms") and engines.get("searched_ms"))


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Appends what is given, and writes the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE")
    for path in parser.parse_args(arguments).add:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(path.read_text(encoding="utf-8"))
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table(load(RESULTS))}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
