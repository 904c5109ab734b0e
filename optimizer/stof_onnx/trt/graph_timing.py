"""Times what enqueues work on a stream by replays of CUDA graphs; tensors of random numbers for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from stof_onnx.fusion.piece_model import random_array
from stof_onnx.trt import cuda

_GRAPH_US, _MOST_RUNS, _REPLAYS = 2000.0, 20, 7


@contextmanager
def random_buffers(shapes: Sequence[tuple[int, ...]], dtype: str, scales: Sequence[float] = ()) -> Iterator[list[int]]:
    """Pointers of device tensors of normal numbers, times `scales`; freed on leaving.

    Args:
        dtype: "fp32", "fp16", or "bf16", whose bits are then those of fp16 numbers.
    """
    rng, made = np.random.default_rng(0), []
    try:
        for shape, scale in zip(shapes, scales or [1.0] * len(shapes), strict=True):
            array = random_array(shape, np.float32 if dtype == "fp32" else np.float16, rng)
            if scale != 1.0:
                array = array * array.dtype.type(scale)
            buffer = cuda.Buffer(array.nbytes)
            buffer.put(np.ascontiguousarray(array))
            made.append(buffer)
        yield [buffer.pointer for buffer in made]
    finally:
        for buffer in made:
            buffer.free()


def median_us(launch: Callable[[], None], stream: Any) -> float:
    """Microseconds of one run: the median over replays of a CUDA graph of several, else over launches.

    Args:
        launch: enqueues one run on `stream`.
    """
    timer = cuda.Timer(stream)
    for _ in range(2):
        launch()
    timer.start()
    launch()
    runs = max(1, min(_MOST_RUNS, round(_GRAPH_US / max(1e3 * timer.stop(), 1.0))))
    graph = cuda.captured(launch, stream, runs)

    def several() -> None:
        if graph is not None:
            cuda.call("cudaGraphLaunch", graph, stream)
        else:
            for _ in range(runs):
                launch()

    several()
    times = []
    for _ in range(_REPLAYS):
        timer.start()
        several()
        times.append(1e3 * timer.stop() / runs)
    if graph is not None:
        cuda.call("cudaGraphExecDestroy", graph)
    return float(np.median(times))
