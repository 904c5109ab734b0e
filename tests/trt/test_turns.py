"""Builds overlap, timings do not: real processes on the real lock, the GPU's name stood in for."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from stof_onnx.trt import cuda, turns

# Takes its turn, says so, and holds it until its input ends.
HOLD = """
import sys
from pathlib import Path
from stof_onnx.trt import turns
turns.lock_file = lambda: Path(sys.argv[2])
print("ready", flush=True)
with getattr(turns, sys.argv[1])():
    print("in", flush=True)
    sys.stdin.read()
"""


class Other:
    """Another process that wants a turn."""

    def __init__(self, kind: str, lock: Path) -> None:
        command = [sys.executable, "-c", HOLD, kind, str(lock)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        assert self.process.stdout.readline() == b"ready\n"

    def wait(self) -> None:
        assert self.process.stdout.readline() == b"in\n"

    def waits(self) -> bool:
        return not select.select([self.process.stdout], [], [], 0.3)[0]

    def end(self) -> None:
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0


@pytest.mark.skipif(turns.fcntl is None, reason="no file locks here")
def test_no_build_overtakes_a_timing_that_waits(tmp_path):
    lock = tmp_path / "gpu.lock"
    first = Other("building", lock)
    first.wait()
    timing = Other("alone", lock)
    assert timing.waits()
    second = Other("building", lock)
    assert second.waits()
    first.end()
    timing.wait()
    timing.end()
    second.wait()
    second.end()


@pytest.mark.skipif(turns.fcntl is None, reason="no file locks here")
def test_a_timing_waits_for_builds_and_builds_for_a_timing(tmp_path):
    lock = tmp_path / "gpu.lock"
    builds = [Other("building", lock) for _ in range(2)]
    for build in builds:
        build.wait()  # both at once
    timing = Other("alone", lock)
    assert timing.waits()
    builds[0].end()
    assert timing.waits()
    builds[1].end()
    timing.wait()
    later = Other("building", lock)
    assert later.waits()
    timing.end()
    later.wait()
    later.end()


def test_where_no_file_can_be_made_nobody_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "lock_file", lambda: tmp_path / "missing" / "gpu.lock")
    with turns.alone(), turns.building():
        pass


def test_one_file_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda, "identity", lambda: "0-1b-0")
    assert turns.lock_file().parent == Path(tempfile.gettempdir())
    assert turns.lock_file().name.endswith("-0-1b-0.lock")
