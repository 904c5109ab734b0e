"""Has a timing stop the other processes of a benchmark run, where stof_onnx.trt.turns would wait for their builds.

A build takes tens of seconds, a timing two. Where several processes build engines side by side, waiting for all of them
before each timing leaves the GPU idle for most of a run. Every process of a run joins a folder; a timing stops the
others (SIGSTOP), waits until their kernels have run out, and lets them go on. What is stopped may have been timing a
tactic; TensorRT takes the best of several such times.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

_RUN_OUT_S = 0.25  # of kernels that are in flight


class Pausing:
    """The processes of one run, by files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._inside = folder, False
        folder.mkdir(parents=True, exist_ok=True)

    def join(self) -> None:
        """Lets timings of others stop this process."""
        with self._locked():
            (self.folder / str(os.getpid())).touch()

    @contextmanager
    def started(self, command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
        """A child that joins; not started beside a timing. It is waited for."""
        with self._locked():
            child = subprocess.Popen(command, **options)
            joined = self.folder / str(child.pid)
            joined.touch()
        with child:
            try:
                yield child
                child.wait()
            finally:
                joined.unlink()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """With all others stopped; one process at a time. Within another one of this process's it is part of that."""
        if self._inside:
            yield
            return
        with self._locked():
            others = self._others()
            try:
                self._inside = True
                _send(others, signal.SIGSTOP)
                time.sleep(_RUN_OUT_S)
                yield
            finally:
                self._inside = False
                _send(others, signal.SIGCONT)

    def go_on(self) -> None:
        """Lets all go on, where a process was killed that may have been timing."""
        with self._locked():
            _send(self._others(), signal.SIGCONT)

    def install(self) -> None:
        """Joins, and has stof_onnx's own timings in this process stop the others."""
        from stof_onnx.trt import turns

        self.join()
        turns.building, turns.alone = nullcontext, self.alone

    def _others(self) -> list[int]:
        named = (int(file.name) for file in self.folder.iterdir() if file.name.isdigit())
        return [pid for pid in named if pid != os.getpid()]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _send(pids: list[int], what: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, what)
