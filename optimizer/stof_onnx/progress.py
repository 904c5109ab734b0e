"""Times the steps, and shows the long ones on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status


class Progress:
    """Steps of one run. On a terminal a running step shows a spinner; elsewhere nothing is printed."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console
        self._status: Status | None = None

    @contextmanager
    def step(self, name: str, timings: dict[str, float]) -> Iterator[None]:
        """Runs a step under its name and adds its seconds to `timings`."""
        start = time.perf_counter()
        try:
            if self.console is not None and self.console.is_terminal:
                with self.console.status(f"{name} …") as self._status:
                    yield
            else:
                yield
        finally:
            self._status = None
            timings[name] = timings.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def bar(self, name: str) -> Iterator[Callable[[str, float], None]]:
        """Within a step: what is called with a text and the share that is done shows both beside the spinner."""

        def show(text: str, share: float) -> None:
            if self._status is not None:
                filled = round(20 * min(1.0, max(0.0, share)))
                self._status.update(f"{name}: {text} {'━' * filled}{'╌' * (20 - filled)}")

        yield show
