"""`--gpu-report FILE`: the run of the gpu and trt tests writes its own record (docs/gpu-tests.md).

Property tests have no deadline: a busy machine is no failure; pytest-timeout guards against hangs.
"""

from __future__ import annotations

import datetime
import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("no-deadline", deadline=None)
    settings.load_profile("no-deadline")

ROOT = Path(__file__).resolve().parents[1]
MARKS = ("gpu", "trt")
HEAD = """# Last runs on a GPU

Written by `pytest -m "gpu or trt" --gpu-report docs/gpu-tests.md`, not by hand: one section a test file, replaced when
that file runs again.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="FILE", help="write the results of the gpu and trt tests to FILE")
    parser.addoption("--gpu-report-commit", metavar="HASH", default="", help="commit, where the tree is no checkout")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu-report"):
        config.pluginmanager.register(GpuReport(config), "gpu-report")


@dataclass
class FileResults:
    """Outcomes of the marked tests of one file."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def ran(self) -> int:
        return self.counts["passed"] + self.counts["failed"]


class GpuReport:
    """Counts outcomes by file, and replaces the sections of the files that ran; one that was skipped whole did not."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = Path(config.getoption("--gpu-report"))
        self.commit = config.getoption("--gpu-report-commit") or _commit()
        self.marked: set[str] = set()
        self.files: dict[str, FileResults] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.marked |= {item.nodeid for item in items if any(map(item.get_closest_marker, MARKS))}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.marked:
            return
        file, _, test = report.nodeid.partition("::")
        results = self.files.setdefault(file, FileResults())
        results.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            results.counts[report.outcome] += 1
            results.failures += [test] * (report.outcome == "failed")

    def pytest_sessionfinish(self) -> None:
        ran = {file: results for file, results in self.files.items() if results.ran}
        if not ran:
            return
        parts = re.split(r"^## ", self.path.read_text(), flags=re.M)[1:] if self.path.exists() else []
        sections = {part.split("\n", 1)[0].strip(): part for part in parts}
        sections |= {file: "\n".join(self._section(file, results)) for file, results in ran.items()}
        staged = self.path.with_suffix(".tmp")
        staged.write_text(HEAD + "".join(f"\n## {sections[name].strip()}\n" for name in sorted(sections)))
        staged.replace(self.path)

    def _section(self, file: str, results: FileResults) -> Iterator[str]:
        now = datetime.datetime.now(datetime.timezone.utc)
        yield file
        yield f"{now:%Y-%m-%d %H:%M} UTC, commit {self.commit}, {', '.join(_versions())}\n"
        counts = ", ".join(f"{results.counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        yield f"{counts} in {results.seconds:.0f} s"
        yield from (f"- failed: `{test}`" for test in results.failures)


def _commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def _versions() -> Iterator[str]:
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")
        yield " driver ".join(listed[0].strip().rsplit(" ", 1))  # the GPUs of one machine are alike
    for name in ("torch", "tensorrt"):
        if importlib.util.find_spec(name):
            module: Any = importlib.import_module(name)
            yield f"{name} {module.__version__}"
