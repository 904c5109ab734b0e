"""Several GPUs measure side by side: one process a GPU, which sees no other (CUDA_VISIBLE_DEVICES).

The GPUs have to be alike: a time counts wherever it was taken. A GPU whose process does not start is left out; where
none does, this process measures. A process that dies later, as TensorRT may make it, costs the time that it was to
take; the next one gets a new process.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context

from stof_onnx.fusion.search.timer import Measurement, Region, Request, Timer
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import Block
from stof_onnx.fusion.templates import Instance, recognise

_log = logging.getLogger(__name__)
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class _Task:
    """A request as a worker gets it: which operators of which block, in which configuration; None for a piece."""

    block: int
    start: int
    stop: int
    config: str | None


class TimerPool:
    """A `ParallelTimer`.

    Args:
        make: makes the timer of a process; it travels there, so a function of a module, or a partial of one.
        gpus: what CUDA_VISIBLE_DEVICES is in each process.
        blocks: that requests are about. They travel without weights.
        here: the timer of this process, for what needs no measurement.
    """

    def __init__(self, make: Callable[[], Timer], gpus: Sequence[str], blocks: Sequence[Block], here: Timer) -> None:
        self._make, self._gpus, self._here = make, list(gpus), here
        self._blocks = [block.light() for block in blocks]
        self._numbers = {block: number for number, block in enumerate(blocks)}
        self._workers: dict[str, ProcessPoolExecutor] = {}

    @property
    def name(self) -> str:
        return self._here.name

    @property
    def devices(self) -> int:
        return max(1, len(self._gpus))

    def configs(self, region: Region) -> Sequence[str]:
        return self._here.configs(region)

    def fused(self, region: Region, config: str) -> Measurement:
        return self.many([(region, config)])[0]

    def left(self, piece: Segment) -> Measurement:
        return self.many([piece])[0]

    def many(self, requests: Sequence[Request]) -> list[Measurement]:
        """The times, in order; each GPU takes the next request when it is free."""
        self._start()
        if not self._gpus:
            return [self._alone(request) for request in requests]
        queue = deque(enumerate(map(self._task, requests)))
        free, found = deque(self._gpus), dict[int, Measurement]()
        running: dict[Future[Measurement], tuple[int, str]] = {}
        while queue or running:
            while queue and free:
                (number, task), gpu = queue.popleft(), free.popleft()
                running[self._workers[gpu].submit(_measure, task)] = number, gpu
            if not running:  # no process is left
                found |= {number: self._alone(requests[number]) for number, _ in queue}
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, gpu = running.pop(future)
                found[number] = self._result(future, gpu)
                free.extend([gpu] if gpu in self._workers else [])
        side_by_side = min(len(requests), self.devices)
        return [_shared(found[number], side_by_side) for number in range(len(requests))]

    def close(self) -> None:
        """Ends the processes; what they are at is waited for."""
        for worker in self._workers.values():
            worker.shutdown(cancel_futures=True)
        self._workers.clear()

    def _task(self, request: Request) -> _Task:
        if isinstance(request, Segment):
            return _Task(self._numbers[request.block], request.start, request.stop, None)
        region, config = request
        return _Task(self._numbers[region.segment.block], *region.segment.span, config)

    def _start(self) -> None:
        """Processes for the GPUs that have none."""
        new = [gpu for gpu in self._gpus if gpu not in self._workers]
        context = get_context("spawn")
        for gpu in new:
            self._workers[gpu] = ProcessPoolExecutor(1, context, _open, (gpu, self._make, self._blocks))
        ready = {gpu: self._workers[gpu].submit(_ready) for gpu in new}  # side by side
        for gpu, future in ready.items():
            try:
                future.result()
            except BrokenProcessPool:
                _log.warning("GPU %s does not measure: its process did not start", gpu)
                self._workers.pop(gpu).shutdown()
                self._gpus.remove(gpu)

    def _alone(self, request: Request) -> Measurement:
        return self._here.left(request) if isinstance(request, Segment) else self._here.fused(*request)

    def _result(self, future: Future[Measurement], gpu: str) -> Measurement:
        try:
            return future.result()
        except BrokenProcessPool:
            self._workers.pop(gpu).shutdown()
            self._start()
            return Measurement(math.inf, problem=f"the process that measured on GPU {gpu} died")


_timer: Timer
_known: list[Block]


def _open(gpu: str, make: Callable[[], Timer], blocks: list[Block]) -> None:
    """Runs first in each process."""
    global _timer, _known
    os.environ[_VISIBLE] = gpu
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the search, which ends this process
    _timer, _known = make(), blocks


def _ready() -> None:
    """Returns when the process has its timer."""


def _measure(task: _Task) -> Measurement:
    segment = Segment(_known[task.block], task.start, task.stop)
    if task.config is None:
        return _timer.left(segment)
    instance = recognise(segment)
    assert isinstance(instance, Instance)
    return _timer.fused(Region(segment, instance), task.config)


def _shared(found: Measurement, count: int) -> Measurement:
    """Of several at once, each counts its share of the time that passes."""
    return replace(found, seconds=found.seconds / count, build_seconds=found.build_seconds / count)
