"""The row programs' table of docs/benchmarks.md, from benchmarks/results/row_programs.jsonl.

    python -m benchmarks.row_programs_table [--add FILE ...]

`--add` appends the lines of files that another machine wrote. The newest line of a case counts; a peer's time stays
until it is measured anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention_bench.record import ROOT, append, load

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "row_programs.jsonl", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- row programs table: begin -->", "<!-- row programs table: end -->"
_PEAK = 4.3e12  # bytes a second of a large copy on the H200

Line = dict[str, Any]


def newest(lines: Iterable[Line]) -> list[Line]:
    """The last line of each case, in order of first appearance, with the peers of earlier ones if need be."""
    last: dict[str, Line] = {}
    for line in lines:
        peers = last.get(line["case"], {"peers": {}})["peers"]
        last[line["case"]] = {**line, "peers": {**peers, **line["peers"]}}
    return list(last.values())


def table(lines: Sequence[Line]) -> str:
    """Markdown."""
    rows = [
        "| program | best µs | its configuration | default µs | floor µs | torch µs | torch.compile µs | rel. error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        us, peers = line["us"], line["peers"]
        best = min(us, key=us.get)
        floor = line["bytes"] / _PEAK * 1e6
        compiled = f"{peers['torch.compile']:.1f}" if "torch.compile" in peers else "–"
        rows.append(
            f"| {line['case']} | {us[best]:.1f} | {best} | {us[line['default']]:.1f} | {floor:.1f} "
            f"| {peers['torch']:.1f} | {compiled} | {line['error']:.1e} |"
        )
    last = lines[-1]
    where = f"{last['gpu']}, driver {last['driver']}, torch {last['torch']}, commit {last['commit']}, {last['date']}."
    return "\n".join([*rows, "", where])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="*", default=[], metavar="FILE")
    for path in parser.parse_args().add:
        for line in load(path):
            append(RESULTS, line)
    head, rest = PAGE.read_text().split(BEGIN)
    text = f"{BEGIN}\n{table(newest(load(RESULTS)))}\n{END}"
    PAGE.write_text(head + text + rest.split(END)[1])


if __name__ == "__main__":
    main()
