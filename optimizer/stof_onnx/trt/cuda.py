"""The few calls of the CUDA runtime that engines need, over cuda-bindings: memory, streams, events, graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from stof_onnx.errors import StofError


def runtime() -> Any:
    """The module with the runtime's functions.

    Raises:
        StofError: cuda-bindings is not installed.
    """
    for name in ("cuda.bindings.runtime", "cuda.cudart"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise StofError("cuda-bindings is not installed", "cuda", "pip install 'stof-onnx[gpu]'")


def call(name: str, *arguments: Any) -> Any:
    """Calls a function of the runtime and returns what follows its status.

    Raises:
        StofError: the call failed.
    """
    status, *values = getattr(runtime(), name)(*arguments)
    if int(status) != 0:
        raise StofError(f"{name} failed: {getattr(status, 'name', status)}", "cuda", "Check the GPU and its driver")
    return values[0] if len(values) == 1 else tuple(values)


def capability() -> tuple[int, int]:
    """Compute capability times ten, and the number of multiprocessors, of device 0.

    Raises:
        StofError: no GPU.
    """
    if call("cudaGetDeviceCount") < 1:
        raise StofError("there is no GPU", "cuda")
    attributes = runtime().cudaDeviceAttr
    read = [
        int(call("cudaDeviceGetAttribute", attribute, 0))
        for attribute in (
            attributes.cudaDevAttrComputeCapabilityMajor,
            attributes.cudaDevAttrComputeCapabilityMinor,
            attributes.cudaDevAttrMultiProcessorCount,
        )
    ]
    return 10 * read[0] + read[1], read[2]


def name() -> str:
    """The name of device 0."""
    text = call("cudaGetDeviceProperties", 0).name
    return text.decode().rstrip("\0") if isinstance(text, bytes) else str(text)


def alike() -> list[str]:
    """The GPUs of the first one's model, as CUDA_VISIBLE_DEVICES names each of them."""
    count = int(call("cudaGetDeviceCount"))
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = given if len(given) >= count else [str(i) for i in range(count)]
    models = [call("cudaGetDeviceProperties", i).name for i in range(count)]
    return [names[i] for i in range(count) if models[i] == models[0]]


def identity() -> str:
    """The PCI address of device 0, as text that fits a file name."""
    found = call("cudaGetDeviceProperties", 0)
    return f"{found.pciDomainID:x}-{found.pciBusID:x}-{found.pciDeviceID:x}"


def free_memory() -> int:
    """Bytes of device memory that are free."""
    return int(call("cudaMemGetInfo")[0])


def copy_to_host(pointer: int, array: np.ndarray) -> None:
    """Fills `array` from the device."""
    call("cudaMemcpy", array.ctypes.data, pointer, array.nbytes, runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost)


def captured(launch: Callable[[], None], stream: Any, runs: int = 1) -> Any:
    """A CUDA graph of what `launch` enqueues on `stream` in `runs` calls; None where it can not be captured.

    The caller launches it, and destroys it with cudaGraphExecDestroy.
    """
    call("cudaStreamBeginCapture", stream, runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
    failed = False
    try:
        for _ in range(runs):
            launch()
    except StofError:
        failed = True
    status, graph = runtime().cudaStreamEndCapture(stream)
    if failed or int(status) != 0:
        runtime().cudaGetLastError()
        return None
    instance = call("cudaGraphInstantiate", graph, 0)
    call("cudaGraphDestroy", graph)
    return instance


class Buffer:
    """Device memory, freed with the object."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self.pointer = int(call("cudaMalloc", self.nbytes))

    def put(self, array: np.ndarray) -> None:
        kind = runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
        call("cudaMemcpy", self.pointer, array.ctypes.data, array.nbytes, kind)

    def get(self, array: np.ndarray) -> None:
        copy_to_host(self.pointer, array)

    def fill(self, byte: int) -> None:
        call("cudaMemset", self.pointer, byte, self.nbytes)

    def free(self) -> None:
        if self.pointer:
            call("cudaFree", self.pointer)
            self.pointer = 0

    def __del__(self) -> None:
        import contextlib

        with contextlib.suppress(Exception):  # the interpreter may be going down
            self.free()


class Timer:
    """A pair of events on a stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.events = [call("cudaEventCreate") for _ in range(2)]

    def start(self) -> None:
        call("cudaEventRecord", self.events[0], self.stream)

    def stop(self) -> float:
        """Milliseconds since `start`, once the stream has got there."""
        call("cudaEventRecord", self.events[1], self.stream)
        call("cudaEventSynchronize", self.events[1])
        return float(call("cudaEventElapsedTime", *self.events))
