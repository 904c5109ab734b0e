"""Ctrl-C and SIGTERM during calls that would lose them.

Python runs a signal's handler in the next Python code of the main thread. While TensorRT builds, that is its logger's
callback, and TensorRT reports and forgets whatever a callback raises: the signal would have no effect at all.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_DEFERRED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def after() -> Iterator[None]:
    """What arrives within is handled when the block is left, as it would have been within."""
    if threading.current_thread() is not threading.main_thread():  # handlers never run here
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in _DEFERRED}
    changed = {number: handler for number, handler in before.items() if callable(handler)}  # not ignored, not C's
    try:
        for number in changed:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)
        for arrived in came[:1]:
            signal.raise_signal(arrived)
