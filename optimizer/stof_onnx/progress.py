"""Times the steps, and shows the long ones on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class Progress:
    """Steps of one run. On a terminal a running step shows a spinner; elsewhere nothing is printed."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console

    @contextmanager
    def step(self, name: str, timings: dict[str, float]) -> Iterator[None]:
        """Runs a step under its name and adds its seconds to `timings`."""
        start = time.perf_counter()
        try:
            if self.console is not None and self.console.is_terminal:
                with self.console.status(f"{name} …"):
                    yield
            else:
                yield
        finally:
            timings[name] = timings.get(name, 0.0) + time.perf_counter() - start
