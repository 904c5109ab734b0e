"""Timings that stop the other processes of a run."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stof_onnx.trt import turns

from benchmarks.pausing import Pausing

_COUNT = "import sys, time\nwhile True: print(1, flush=True); time.sleep(0.01)"


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_timing_stops_a_child_and_lets_it_go_on(tmp_path):
    pausing, said = Pausing(tmp_path / "run"), tmp_path / "said"
    with said.open("w", encoding="utf-8") as out, pausing.started([sys.executable, "-c", _COUNT], stdout=out) as child:
        while not lines(said):
            time.sleep(0.01)
        with pausing.alone():
            before = lines(said)
            with pausing.alone():  # a part of this one
                pass
            time.sleep(0.3)
            assert lines(said) == before
        deadline = time.monotonic() + 10
        while lines(said) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lines(said) > before
        child.kill()
    with pausing.alone():  # those that have ended are not minded
        pass


def _time(pausing: Pausing, log: Path) -> None:
    pausing.install()
    for _ in range(5):
        with turns.building(), turns.alone():
            with log.open("a", encoding="utf-8") as file:
                file.write("begin\n")
            time.sleep(0.01)
            with log.open("a", encoding="utf-8") as file:
                file.write("end\n")


def test_timings_of_several_processes_exclude_one_another(tmp_path):
    context, log = multiprocessing.get_context("spawn"), tmp_path / "log"
    jobs = [context.Process(target=_time, args=(Pausing(tmp_path / "run"), log)) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0]
    assert log.read_text(encoding="utf-8").splitlines() == ["begin", "end"] * 10


def test_a_failed_child_is_waited_for_and_forgotten(tmp_path):
    pausing = Pausing(tmp_path / "run")
    with pytest.raises(ValueError), pausing.started([sys.executable, "-c", "pass"], stdout=subprocess.DEVNULL):
        raise ValueError
    assert not [file for file in pausing.folder.iterdir() if file.name.isdigit()]
