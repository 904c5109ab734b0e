"""Generated kernels in Triton's interpreter, in a process of its own: Triton reads the switch when it is imported.

Each line of the process's stdin is a JSON list: what to run, configuration, rows, seed; the answer is the largest error
over its bound.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def interpreter(module: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `module`, whose main is `answer`. The test is skipped where Triton or torch is missing."""
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", module]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.stdin.close()


def ask(process: subprocess.Popen[str], *request: Any) -> str:
    """The answer to one request; empty where the interpreter failed."""
    assert process.stdin and process.stdout
    print(json.dumps(request), file=process.stdin, flush=True)
    return process.stdout.readline().strip()


def answer(ratio: Callable[[str, str, int, int, Path], float]) -> None:
    """Answers every line of stdin. `ratio` takes what to run, configuration, rows, seed, and a folder for sources."""
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            print(ratio(*json.loads(line), Path(folder)), flush=True)


def loaded(text: str, name: str, folder: Path) -> Any:
    """The kernel `name` of a generated source."""
    path = folder / f"kernel_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
