"""One engine in use: every size of its profile, contexts at once, CUDA graphs, memory, device arrays, bad inputs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import psutil
import pytest
from stof_onnx import cli
from stof_onnx.errors import StofError
from stof_onnx.trt import cuda
from stof_onnx.trt.device_arrays import DeviceArray
from stof_onnx.trt.session import EngineSession
from stof_onnx.verify.session import Runner

from tests.trt.engines import HIDDEN, MARKS, SEQ, Engines
from tests.trt.memory import device_memory

pytestmark = MARKS
SIZES = ((1, 16), (4, 256), (8, SEQ), (3, 77), (8, 129), (1, SEQ))


@pytest.fixture
def session(engines: Engines):
    opened = EngineSession(engines.embedded)
    yield opened
    opened.close()


def test_one_engine_serves_every_size_of_its_profile(engines, session, rng):
    for batch, seq in SIZES:
        feeds = engines.feeds(rng, batch, seq)
        engines.assert_right(feeds, session.run(feeds)["y"])


@pytest.mark.parametrize("own_engine", [False, True], ids=["two contexts of one engine", "two engines"])
def test_two_contexts_on_two_streams_at_once(engines, session, rng, own_engine):
    """Every round's outputs, of inputs and sizes of their own, are what the context computes alone."""
    other = EngineSession(engines.embedded) if own_engine else session.another()
    sessions = [session, other]
    feeds = [engines.feeds(rng, b, s) for b, s in ((8, SEQ), (5, 300))]
    alone = [s.run(f)["y"] for s, f in zip(sessions, feeds, strict=True)]
    for expected, one in zip(alone, feeds, strict=True):
        engines.assert_right(one, expected)
    for _ in range(10):
        for one, feed in zip(sessions, feeds, strict=True):
            one.bind(feed)
        for _ in range(20):
            for one in sessions:
                one.execute()
        cuda.call("cudaDeviceSynchronize")
        for one, expected in zip(sessions, alone, strict=True):
            np.testing.assert_array_equal(one.fetch()["y"], expected)
    other.close()


def test_a_cuda_graph_replays_with_new_inputs(engines, session, rng):
    feeds = [engines.feeds(rng, 4, 200) for _ in range(3)]
    expected = [session.run(f)["y"] for f in feeds]
    graph = session.capture()
    assert graph is not None
    for _ in range(2):
        for one, want in zip(feeds, expected, strict=True):
            session.bind(one)  # the same buffers: new values, poisoned outputs
            cuda.call("cudaGraphLaunch", graph, session.stream)
            cuda.call("cudaStreamSynchronize", session.stream)
            np.testing.assert_array_equal(session.fetch()["y"], want)
    cuda.call("cudaGraphExecDestroy", graph)


def test_ten_thousand_inferences_take_no_memory(engines, session, rng):
    """Neither on the device nor, but for a megabyte of noise, in the process."""
    session.run(engines.feeds(rng))
    process = psutil.Process()

    def infer(count: int) -> None:
        for _ in range(count):
            session.execute()
        cuda.call("cudaDeviceSynchronize")

    infer(1000)
    device, host = device_memory(), process.memory_info().rss
    infer(10_000)
    grown = process.memory_info().rss - host
    print(f"host memory grew by {grown} bytes")
    assert device_memory() <= device
    assert grown < 1 << 20


def test_opening_and_closing_takes_no_memory(engines, rng):
    feeds = engines.feeds(rng)

    def once() -> None:
        session = EngineSession(engines.embedded)
        session.run(feeds)
        session.close()

    once()
    once()
    before = device_memory()
    for _ in range(5):
        once()
    assert device_memory() - before < 1 << 20


def test_float16_at_both_ends(engines, rng, tmp_path):
    """`verify` and `bench` feed it what it takes; the plain engine of the comparison gets the same types."""
    engine = tmp_path / "half.engine"
    engines.optimize("--engine", str(engine), "--half-io", "--no-verify", "-o", str(tmp_path / "o.onnx"))
    session = EngineSession(engine)
    assert session.dtype("x") == session.dtype("y") == np.float16
    feeds = engines.feeds(rng, 2, 50)
    engines.assert_right(feeds, session.run(feeds)["y"].astype(np.float32))
    session.close()
    assert cli.main(["verify", str(engines.model), str(engine)]) == 0


class OnDevice:
    """What cupy, numba, torch and pycuda arrays offer."""

    def __init__(self, array: np.ndarray, strides: tuple[int, ...] | None = None) -> None:
        self.buffer = cuda.Buffer(array.nbytes)
        self.buffer.put(array)
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (self.buffer.pointer, False),
            "strides": strides,
            "stream": 1,
            "version": 3,
        }


def test_arrays_on_the_device_are_taken_as_they_are(engines, session, rng):
    feeds = engines.feeds(rng, 3, 100)
    expected = session.run(feeds)["y"]
    x, y = OnDevice(feeds["x"]), OnDevice(np.zeros_like(expected))
    session.bind({"x": x}, {"y": y})
    assert session.context.get_tensor_address("x") == x.buffer.pointer
    session.execute()
    cuda.call("cudaStreamSynchronize", session.stream)
    got = np.empty_like(expected)
    y.buffer.get(got)
    np.testing.assert_array_equal(got, expected)
    pointer = DeviceArray(x.buffer.pointer, feeds["x"].shape, feeds["x"].dtype)
    np.testing.assert_array_equal(session.run({"x": pointer})["y"], expected)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 100, HIDDEN), np.float16), "x' is float16 of 3x100x128, the engine needs float32"),
        (np.zeros((9, 100, HIDDEN), np.float32), "outside the engine's profile.*takes 1x16x128 to 8x512x128"),
    ],
)
def test_arrays_on_the_device_have_to_fit(session, array, message):
    with pytest.raises(StofError, match=message):
        session.bind({"x": OnDevice(array)})
    strides = tuple(reversed(np.zeros(array.shape[::-1], np.float32).strides))
    with pytest.raises(StofError, match="not C-contiguous"):
        session.bind({"x": OnDevice(array.astype(np.float32), strides)})


@pytest.mark.parametrize(
    "shape", [(0, 16, HIDDEN), (9, 16, HIDDEN), (1, 15, HIDDEN), (1, SEQ + 1, HIDDEN), (1, 16, 64), (16, HIDDEN), ()]
)
def test_shapes_outside_the_profile_are_refused_and_do_no_harm(engines, session, rng, shape):
    found = re.escape("x".join(map(str, shape)) or "no axes")
    with pytest.raises(StofError, match=f"'x' of {found} is outside the engine's profile.*1x16x128 to 8x512x128"):
        session.run({"x": np.zeros(shape, np.float32)})
    feeds = engines.feeds(rng, 2, 33)
    engines.assert_right(feeds, session.run(feeds)["y"])


def test_missing_inputs_and_unknown_outputs_are_named(engines, session, rng):
    with pytest.raises(StofError, match="no values for the input 'x'"):
        session.run({"z": np.zeros((1, 16, HIDDEN), np.float32)})
    with pytest.raises(StofError, match="no output 'z'"):
        session.bind(engines.feeds(rng), {"z": OnDevice(np.zeros(1, np.float32))})


def test_nan_in_one_batch_entry_stays_there(engines, session, rng):
    feeds = engines.feeds(rng, 2, 64)
    feeds["x"][1] = np.nan
    got, expected = session.run(feeds)["y"], Runner(engines.proto, Path()).run(feeds)["y"]
    assert np.isfinite(got[0]).all() and np.isnan(got[1]).all() and np.isnan(expected[1]).all()
