"""Totals of the grid on the terminal, and the share that must be replaced, once all cases have run."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.grid.outcome import Outcome

PROPERTY = "grid outcome"
REQUIRED_SHARE = 0.95


def _outcomes(config: pytest.Config) -> list[Outcome]:
    """Outcomes of the cases that ran in this session, from all workers."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = [report for reports in reporter.stats.values() for report in reports] if reporter else []
    return [Outcome.from_json(json.loads(text)) for text in _texts(reports)]


def _texts(reports: list[object]) -> Iterator[str]:
    for report in reports:
        if getattr(report, "when", "") == "call":
            yield from (value for name, value in getattr(report, "user_properties", ()) if name == PROPERTY)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = _outcomes(config)
    if outcomes:
        from tests.grid.table import totals

        terminalreporter.section("grid of exports")
        terminalreporter.write_line(totals(outcomes))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    outcomes = _outcomes(session.config)
    if not outcomes:
        return
    from tests.grid.table import static_share

    if static_share(outcomes) < REQUIRED_SHARE:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
