"""Processes that use one GPU take turns: builds may overlap, while a timing has the GPU to itself.

Engines of several models are often built at once on one machine. A time taken beside another process's builds says
little, and would decide which engine is kept. So builds hold a shared lock and timings an exclusive one, on a file of
the temporary directory that is named after the GPU. A second file is the queue: whoever wants a turn stands in it, so
that no new build overtakes a timing that waits. Where no such file can be made, nobody waits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stof_onnx.trt import cuda

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


@contextmanager
def building() -> Iterator[None]:
    """Beside other builds, never beside a timing."""
    with _locked(exclusive=False):
        yield


@contextmanager
def alone() -> Iterator[None]:
    """With no build and no other timing of these processes on the GPU."""
    with _locked(exclusive=True):
        yield


def lock_file() -> Path:
    """The file of the first GPU and this user."""
    owner = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"stof-onnx-{owner}-{cuda.identity()}.lock"


@contextmanager
def _locked(exclusive: bool) -> Iterator[None]:
    queue, turn = _open(".queue"), _open("")
    try:
        _lock(queue, exclusive)
        _lock(turn, exclusive)
        if not exclusive:
            queue = _close(queue)  # a timing keeps the queue closed until it is done
        yield
    finally:
        _close(turn)
        _close(queue)


def _open(suffix: str) -> int:
    """A descriptor of the lock file, or of the queue's; -1 where there can be none."""
    try:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        return os.open(f"{lock_file()}{suffix}", flags, 0o600)
    except OSError:
        return -1


def _lock(handle: int, exclusive: bool) -> None:
    if handle >= 0 and fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)


def _close(handle: int) -> int:
    """Closes it, and with it the lock."""
    if handle >= 0:
        os.close(handle)
    return -1
