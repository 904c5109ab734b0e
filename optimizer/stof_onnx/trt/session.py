"""Runs a TensorRT engine: outputs, times by CUDA-graph replay, per-layer times, memory."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stof_onnx.errors import StofError
from stof_onnx.files import read_source
from stof_onnx.trt import cuda
from stof_onnx.trt.availability import load_plugins, tensorrt
from stof_onnx.trt.build import logger
from stof_onnx.trt.device_arrays import DeviceArray, device_array

_WARM_UP = 5
_GROUP_MS, _LEAST_TIMES, _MOST_TIMES = 0.5, 10, 2000
_DTYPES = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}


@dataclass(frozen=True)
class Timing:
    """Milliseconds an inference: median, p90, p99, and whether a CUDA graph was replayed. `count` inferences."""

    median: float
    p90: float
    p99: float
    graph: bool
    count: int


class EngineSession:
    """One engine with one execution context and a stream.

    Args:
        engine: serialized bytes, or the file.
        plugins: the plugin library of an engine that does not embed it.

    Raises:
        StofError: the engine can not be read or does not load here.
    """

    def __init__(self, engine: bytes | Path, plugins: Path | None = None) -> None:
        trt = tensorrt()
        where = str(engine) if isinstance(engine, Path) else "engine"
        if plugins is not None:
            load_plugins(plugins)
        data = read_source(engine) if isinstance(engine, Path) else engine
        log = logger()
        log.errors.clear()
        before = cuda.free_memory()
        self._runtime = trt.Runtime(log)
        self._runtime.engine_host_code_allowed = True  # embedded plugins are host code
        begun = time.perf_counter()
        self.engine = self._runtime.deserialize_cuda_engine(data)
        self.load_seconds = time.perf_counter() - begun
        if self.engine is None:
            reason = "; ".join(log.errors[-2:]) or "no reason given"
            raise StofError(f"TensorRT {trt.__version__} can not load the engine: {reason}", where, _advice(log.errors))
        self._open(where)
        self.memory = before - cuda.free_memory()  # bytes: weights, constants, activations

    def another(self) -> EngineSession:
        """A session of the same engine, with an execution context and a stream of its own.

        Raises:
            StofError: there is no memory for it.
        """
        session = object.__new__(EngineSession)
        session._runtime, session.engine, session.load_seconds = self._runtime, self.engine, 0.0
        before = cuda.free_memory()
        session._open("engine")
        session.memory = before - cuda.free_memory()
        return session

    def _open(self, where: str) -> None:
        self.context = self.engine.create_execution_context()
        if self.context is None:
            raise StofError("no execution context: " + "; ".join(logger().errors[-2:]), where, "Free device memory")
        self.stream = cuda.call("cudaStreamCreate")
        mode = tensorrt().TensorIOMode
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        self.inputs = [n for n in names if self.engine.get_tensor_mode(n) == mode.INPUT]
        self.outputs = [n for n in names if n not in self.inputs]
        self._buffers: dict[str, cuda.Buffer] = {}
        self._bound: dict[str, np.ndarray | DeviceArray] = {}  # keeps what others own alive

    def dtype(self, name: str) -> np.dtype:
        """The numpy dtype of an input or output."""
        kind = self.engine.get_tensor_dtype(name).name
        if kind not in _DTYPES:
            raise StofError(f"'{name}' is {kind}, which numpy has not", "engine", "Run it with TensorRT itself")
        return np.dtype(_DTYPES[kind])

    def opt_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input that the engine was tuned for."""
        shapes = {}
        for name in self.inputs:
            shape = tuple(self.engine.get_tensor_shape(name))
            if any(size < 0 for size in shape):
                shape = tuple(self.engine.get_tensor_profile_shape(name, 0)[1])
            shapes[name] = shape
        return shapes

    def bind(self, feeds: Mapping[str, Any], outputs: Mapping[str, Any] | None = None) -> None:
        """Gives the engine its inputs, and room for its outputs.

        Args:
            feeds: values by name. Numpy arrays are copied to the device (and cast). What lies there already is taken as
                it is: objects with `__cuda_array_interface__` or DLPack, and `DeviceArray(pointer, shape, dtype)`.
            outputs: arrays on the device to write to; the others get buffers of the session, poisoned.

        Raises:
            StofError: a missing input, a shape outside the profile, or an array on the device that does not fit.
        """
        outputs = outputs or {}
        if unknown := sorted({*outputs} - {*self.outputs}):
            raise StofError(f"the engine has no output '{unknown[0]}'", "engine", f"It has {', '.join(self.outputs)}")
        bound: dict[str, np.ndarray | DeviceArray] = {}
        for name in self.inputs:
            if name not in feeds:
                raise StofError(f"no values for the input '{name}'", "engine")
            array = device_array(feeds[name], name, int(self.stream))
            bound[name] = array or np.asarray(feeds[name], self.dtype(name), order="C")
            self._set_shape(name, bound[name].shape)
        for name, value in outputs.items():
            array = device_array(value, name, int(self.stream))
            if array is None:
                raise StofError(f"the output '{name}' is not on the GPU", "engine", "Give an array that is, or none")
            bound[name] = array
        self._bound = bound
        for name in (*self.inputs, *self.outputs):
            self.context.set_tensor_address(name, self._address(name, bound.get(name)))

    def _set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        expected = tuple(self.engine.get_tensor_shape(name))
        fits = len(shape) == len(expected) and all(e in (-1, s) for s, e in zip(shape, expected, strict=True))
        if not fits or not self.context.set_input_shape(name, shape):
            found = "x".join(map(str, shape)) or "no axes"
            if -1 in expected:
                low, _, high = ("x".join(map(str, s)) for s in self.engine.get_tensor_profile_shape(name, 0))
                advice = f"It takes {low} to {high}"
            else:
                advice = f"It takes {'x'.join(map(str, expected))}"
            raise StofError(f"input '{name}' of {found} is outside the engine's profile", "engine", advice)

    def _address(self, name: str, value: np.ndarray | DeviceArray | None) -> int:
        shape = tuple(self.context.get_tensor_shape(name))
        if any(size < 0 for size in shape):
            raise StofError(f"the shape of '{name}' depends on the data", "engine", "Run it with TensorRT itself")
        if isinstance(value, DeviceArray):
            if value.dtype != self.dtype(name) or value.shape != shape:
                found = f"{value.dtype} of {'x'.join(map(str, value.shape))}"
                wanted = f"{self.dtype(name)} of {'x'.join(map(str, shape))}"
                raise StofError(f"'{name}' is {found}, the engine needs {wanted}", "engine")
            return value.pointer
        nbytes = math.prod(shape) * self.dtype(name).itemsize
        if name not in self._buffers or self._buffers[name].nbytes < nbytes:
            self._buffers[name] = cuda.Buffer(nbytes)
        if value is not None:
            self._buffers[name].put(value)
        else:
            self._buffers[name].fill(0xFF)
        return self._buffers[name].pointer

    def execute(self) -> None:
        """Enqueues one inference of what `bind` bound.

        Raises:
            StofError: the launch failed.
        """
        if not self.context.execute_async_v3(int(self.stream)):
            raise StofError("the inference failed: " + "; ".join(logger().errors[-2:]), "engine")

    def run(self, feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs by name, as numpy arrays. `feeds` as in `bind`."""
        self.bind(feeds)
        self.execute()
        cuda.call("cudaStreamSynchronize", self.stream)
        return self.fetch()

    def fetch(self) -> dict[str, np.ndarray]:
        """Copies of the outputs as they are on the device."""
        found = {}
        for name in self.outputs:
            found[name] = np.empty(tuple(self.context.get_tensor_shape(name)), self.dtype(name))
            cuda.copy_to_host(self.context.get_tensor_address(name), found[name])
        return found

    def time(self, feeds: Mapping[str, np.ndarray], seconds: float = 0.5, use_graph: bool = True) -> Timing:
        """Times inferences for about `seconds`, by replays of a CUDA graph where the engine can be captured."""
        self.bind(feeds)
        for _ in range(_WARM_UP):
            self.execute()
        cuda.call("cudaStreamSynchronize", self.stream)
        graph = self.capture() if use_graph else None
        launch = self.execute if graph is None else (lambda: cuda.call("cudaGraphLaunch", graph, self.stream))
        timer = cuda.Timer(self.stream)

        def several(count: int) -> float:
            timer.start()
            for _ in range(count):
                launch()
            return timer.stop() / count

        estimate = several(_WARM_UP)
        # Short inferences are timed a few at a time, so that the host's launches do not show.
        group = max(1, min(50, round(_GROUP_MS / estimate)))
        times: list[float] = []
        while len(times) < _LEAST_TIMES or (group * sum(times) < 1e3 * seconds and len(times) < _MOST_TIMES):
            times.append(several(group))
        if graph is not None:
            cuda.call("cudaGraphExecDestroy", graph)
        median, p90, p99 = (float(np.percentile(times, q)) for q in (50, 90, 99))
        return Timing(median, p90, p99, graph is not None, group * len(times))

    def layer_times(self, feeds: Mapping[str, np.ndarray], rounds: int = 10) -> dict[str, float]:
        """Microseconds of each layer, by TensorRT's profiler (which adds its own cost to short layers)."""
        trt = tensorrt()

        class Profiler(trt.IProfiler):  # type: ignore[name-defined]
            def __init__(self) -> None:
                trt.IProfiler.__init__(self)
                self.times: dict[str, float] = {}

            def report_layer_time(self, name: str, ms: float) -> None:
                self.times[name] = self.times.get(name, 0.0) + ms

        self.bind(feeds)
        profiler = Profiler()
        self.context.profiler = profiler
        for round_ in range(rounds + 2):
            if round_ == 2:
                profiler.times.clear()
            self.execute()
            cuda.call("cudaStreamSynchronize", self.stream)
        return {name: 1e3 * ms / rounds for name, ms in profiler.times.items()}

    def close(self) -> None:
        """Frees everything on the device."""
        self._bound.clear()
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()
        self.context = None
        self.engine = None
        cuda.call("cudaStreamDestroy", self.stream)

    def capture(self) -> Any:
        """The executable CUDA graph of one inference of what `bind` bound, or None where it can not be captured.

        Run one inference before. The caller launches and destroys it.
        """
        return cuda.captured(self.execute, self.stream)


def _advice(errors: list[str]) -> str:
    text = " ".join(errors).lower()
    if "getplugincreator" in text or ("plugin" in text and "not found" in text):
        return "Its plugin library is not in the engine: set STOF_PLUGIN_LIBRARY, or build with --embed"
    if any(word in text for word in ("temp", "permission", "dlopen", "read-only", "no such file", "failed to map")):
        return (
            "Embedded plugins need a temporary directory (TMPDIR) that is writable and not noexec: name one, or build "
            "with --no-embed"
        )
    return "Build it anew with this TensorRT, on this GPU"
