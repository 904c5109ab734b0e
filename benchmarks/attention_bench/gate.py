"""One GPU, several processes: each holds the gate while it uses the GPU and leaves it while it compiles.

FlexAttention and FlashAttention-4 compile for seconds a mask; a measurement takes milliseconds. With the gate, the
compilations of several cases run side by side and never beside another process's measurement.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Gate:
    """A lock on a file (free again when its process dies); without a path it is always open."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._held = False

    def use(self, path: Path | None) -> None:
        """Names the file that the processes share."""
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT)

    @property
    def shared(self) -> bool:
        """Whether other processes use the GPU too."""
        return self._file is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """The GPU is this process's alone."""
        self._lock()
        try:
            yield
        finally:
            self._unlock()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Lets others in meanwhile, where this process holds the gate."""
        had = self._held
        if had:
            self._unlock()
        try:
            yield
        finally:
            if had:
                self._lock()

    def _lock(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._held = True

    def _unlock(self) -> None:
        self._held = False
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)


@contextmanager
def time_box(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread after `seconds` (0: never)."""

    def over(signum: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    old = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


gate = Gate()
