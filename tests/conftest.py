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

Written by `pytest -m gpu --gpu-report docs/gpu-tests.md` (and `-m trt`), not by hand; one section a mark.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="FILE", help="write the results of the gpu and trt tests to FILE")
    parser.addoption("--gpu-report-commit", metavar="HASH", default="", help="commit, where the tree is no checkout")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu-report"):
        config.pluginmanager.register(GpuReport(config), "gpu-report")


class GpuReport:
    """Counts outcomes by mark and file, and replaces the sections of the marks that ran."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = Path(config.getoption("--gpu-report"))
        self.commit = config.getoption("--gpu-report-commit") or _commit()
        self.marks: dict[str, str] = {}
        self.counts: dict[str, dict[str, Counter[str]]] = {m: {} for m in MARKS}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in MARKS:
                if item.get_closest_marker(mark):
                    self.marks[item.nodeid] = mark

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        mark = self.marks.get(report.nodeid)
        if mark and (report.when == "call" or report.outcome != "passed"):
            file = report.nodeid.split("::")[0]
            self.counts[mark].setdefault(file, Counter())[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        text = self.path.read_text() if self.path.exists() else HEAD
        for mark, files in self.counts.items():
            if files:
                text = re.sub(rf"\n## {mark}\n.*?(?=\n## |\Z)", "", text, flags=re.S).rstrip() + "\n\n"
                text += "\n".join(self._section(mark, files)) + "\n"
        staged = self.path.with_suffix(".tmp")
        staged.write_text(text)
        staged.replace(self.path)

    def _section(self, mark: str, files: dict[str, Counter[str]]) -> Iterator[str]:
        now = datetime.datetime.now(datetime.timezone.utc)
        yield f"## {mark}"
        yield f"{now:%Y-%m-%d %H:%M} UTC, commit {self.commit}, {', '.join(_versions())}\n"
        yield "| file | passed | failed | skipped |"
        yield "|---|---|---|---|"
        for file, c in sorted(files.items()):
            yield f"| {file} | {c['passed']} | {c['failed']} | {c['skipped']} |"


def _commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def _versions() -> Iterator[str]:
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        yield " driver ".join(subprocess.run(query, capture_output=True, text=True).stdout.strip().rsplit(" ", 1))
    for name in ("torch", "tensorrt"):
        if importlib.util.find_spec(name):
            module: Any = importlib.import_module(name)
            yield f"{name} {module.__version__}"
