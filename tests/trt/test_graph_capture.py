"""What is captured, and what becomes of work that can not be; with a runtime that only counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from stof_onnx.errors import StofError
from stof_onnx.trt import cuda


class Runtime:
    """Notes the calls; ends captures with `status`."""

    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal="thread")

    def __init__(self, status: int = 0) -> None:
        self.calls: list[str] = []
        self.status = status

    def __getattr__(self, name: str):
        def call(*arguments):
            self.calls.append(name)
            return {
                "cudaStreamEndCapture": (self.status, "graph"),
                "cudaGraphInstantiate": (0, "instance"),
            }.get(name, (0,))

        return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(cuda, "runtime", lambda: made)
    return made


def test_every_run_is_captured_and_the_graph_is_freed(runtime: Runtime) -> None:
    assert cuda.captured(lambda: runtime.calls.append("launch"), "stream", 3) == "instance"
    begin, *launches, end, instantiate, destroy = runtime.calls
    assert launches == ["launch"] * 3
    assert (begin, end) == ("cudaStreamBeginCapture", "cudaStreamEndCapture")
    assert (instantiate, destroy) == ("cudaGraphInstantiate", "cudaGraphDestroy")


def test_a_capture_that_the_runtime_gives_up_clears_its_error(runtime: Runtime) -> None:
    runtime.status = 901
    assert cuda.captured(lambda: None, "stream") is None
    assert runtime.calls == ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGetLastError"]


def test_a_launch_that_fails_ends_the_capture(runtime: Runtime) -> None:
    def fail() -> None:
        raise StofError("no", "launch")

    assert cuda.captured(fail, "stream") is None
    assert "cudaStreamEndCapture" in runtime.calls and "cudaGraphInstantiate" not in runtime.calls
