"""Compiles what is not in the cache, in parallel processes.

The processes stay for the next call, since importing Triton takes a second or more; they end with this one.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import IO

from stof_onnx.errors import StofError
from stof_onnx.kernels.cubin_program import KernelImage
from stof_onnx.kernels.triton_rows.cache import KernelCache
from stof_onnx.kernels.triton_rows.request import KernelRequest

_MOST_JOBS = 8
_ADVICE = "pip install 'stof-onnx[fusion]', or bring a cache of compiled kernels (STOF_CACHE_DIR)"


def compile_kernels(
    requests: Sequence[KernelRequest],
    cache: KernelCache | None = None,
    jobs: int | None = None,
    done: Callable[[int], None] = lambda compiled: None,
) -> list[KernelImage]:
    """The image of each request, from the cache or compiled now. Equal requests are compiled once.

    Args:
        jobs: compiling processes (default: one a core, at most 8).
        done: is told how many kernels have been compiled, after each one.

    Raises:
        StofError: a kernel is not cached and Triton is not installed, or does not compile it.
    """
    cache = cache or KernelCache()
    found = {request: cache.get(request) for request in dict.fromkeys(requests)}
    missing = [request for request, image in found.items() if image is None]
    if missing:
        if cache.triton is None:
            raise StofError(f"{len(missing)} kernels are not compiled, and Triton is not installed", "kernels", _ADVICE)
        found.update(_compile(missing, cache, jobs or _cores(), done))
    images = [found[request] for request in requests]
    return [image for image in images if image is not None]


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_JOBS)


def _compile(
    requests: list[KernelRequest], cache: KernelCache, jobs: int, done: Callable[[int], None]
) -> dict[KernelRequest, KernelImage]:
    waiting: SimpleQueue[KernelRequest] = SimpleQueue()
    for request in requests:
        waiting.put(request)
    images: dict[KernelRequest, KernelImage] = {}
    workers = [_take() for _ in range(max(1, min(jobs, len(requests))))]

    def serve(worker: _Worker) -> None:
        while True:
            try:
                request = waiting.get_nowait()
            except Empty:
                return
            image = worker.compile(request)
            cache.put(request, image)
            images[request] = image
            done(len(images))

    pool = ThreadPoolExecutor(len(workers))
    try:
        for outcome in [pool.submit(serve, worker) for worker in workers]:
            outcome.result()
        _idle.extend(workers)
    except BaseException:  # Ctrl-C, too: some owe answers that no one will read; without them their threads end
        for worker in workers:
            worker.close()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return images


_idle: list[_Worker] = []


def _take() -> _Worker:
    while _idle:
        worker = _idle.pop()
        if worker.alive:
            return worker
        worker.close()
    return _Worker()


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().close()


class _Worker:
    """A compiling process."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stof_onnx.kernels.triton_rows.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def compile(self, request: KernelRequest) -> KernelImage:
        """Compiles one kernel.

        Raises:
            StofError: it does not compile.
        """
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(request.to_json() + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        answer = json.loads(line) if line else {"error": f"the compiler ended: {self._last_words()}"}
        if "error" in answer:
            reason = " ".join(answer["error"].split())
            raise StofError(f"Triton does not compile a kernel for sm_{request.arch}: {reason}", "kernels")
        return KernelImage(**{**answer, "cubin": base64.b64decode(answer["cubin"])})

    def _last_words(self) -> str:
        self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read()[-400:].decode(errors="replace").strip()
        return f"exit code {self._process.returncode}{f', {said}' if said else ''}"

    def close(self) -> None:
        """Ends the process; the end of its input lets it tidy up."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()
