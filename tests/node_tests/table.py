"""The table of node tests in docs/supported_patterns.md: `python -m tests.node_tests.table` writes it anew."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.node_tests.onnx_cases import attention_tests
from tests.node_tests.outcome import Outcome, evaluate

DOCUMENT = Path(__file__).parents[2] / "docs" / "supported_patterns.md"
BEGIN = "<!-- node tests: written by `python -m tests.node_tests.table` -->"
END = "<!-- end of node tests -->"


def render(outcomes: Iterable[Outcome]) -> str:
    """Markdown: one row a test of the operator, with its decomposed twin beside it."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    lines = ["| node test | `Attention` | decomposed (`_expanded`) |", "|---|---|---|"]
    for name in by_name:
        if not name.endswith("_expanded"):
            twin = by_name.get(f"{name}_expanded")
            lines.append(f"| {name.removeprefix('test_attention_')} | {_cell(by_name[name])} | {_cell(twin)} |")
    return "\n".join(lines)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "–"
    if outcome.errors:
        return "**wrong**"
    return f"replaced: {outcome.replaced}" if outcome.replaced else f"left alone: {outcome.refused}"


def written() -> str:
    """The table that the document holds now."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.split(BEGIN, 1)[1].split(END, 1)[0].strip()


def write(table: str) -> None:
    """Puts `table` between the marks of the document."""
    head, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}", encoding="utf-8")


def run_all() -> list[Outcome]:
    """Every shipped test, evaluated."""
    with tempfile.TemporaryDirectory() as folder:
        return [evaluate(test, Path(folder)) for test in attention_tests()]


if __name__ == "__main__":
    write(render(run_all()))
    print(f"written: {DOCUMENT}")
