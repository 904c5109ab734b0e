"""Ctrl-C and SIGTERM while TensorRT calls back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import SimpleNamespace

import pytest
from stof_onnx import signals
from stof_onnx.trt import build


def swallowed(number: int) -> None:
    """What TensorRT does: the handler runs in a callback, and what it raises is lost."""
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), number)
        for _ in range(1000):  # gives the handler its turn
            pass


@pytest.fixture(autouse=True)
def handlers():
    """Ctrl-C raises, also where these tests run in the background; SIGTERM as the command line has it."""

    def leave(*_: object) -> None:
        raise SystemExit(143)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, leave)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_is_heard_after_the_block(number, raised):
    reached = []
    with pytest.raises(raised), signals.after():
        swallowed(number)
        swallowed(number)
        reached.append(1)
    assert reached
    with pytest.raises(raised):  # the handlers are as before
        signal.raise_signal(number)


def test_errors_pass_and_handlers_come_back():
    with pytest.raises(ValueError, match="mine"), signals.after():
        raise ValueError("mine")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_does_not_lose_the_signal():
    with pytest.raises(KeyboardInterrupt), signals.after():
        swallowed(signal.SIGINT)
        raise ValueError("no engine")


def test_what_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals.after():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_leave_the_handlers_alone():
    seen = []

    def work():
        with signals.after():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_build_ends_with_ctrl_c(monkeypatch, tmp_path):
    """Pressed while TensorRT logs: the engine is built, then the command is interrupted."""
    built = []

    def serialized(network, config):
        swallowed(signal.SIGINT)
        built.append(network)
        return b"engine"

    builder = SimpleNamespace(
        create_network=lambda flags: "network",
        create_builder_config=lambda: "config",
        build_serialized_network=serialized,
    )
    parser = SimpleNamespace(parse_from_file=lambda path: True)
    trt = SimpleNamespace(Builder=lambda log: builder, OnnxParser=lambda network, log: parser)
    monkeypatch.setattr(build, "tensorrt", lambda: trt)
    monkeypatch.setattr(build, "logger", lambda: SimpleNamespace(errors=[]))
    monkeypatch.setattr(build, "_network_flags", lambda trt: 0)
    monkeypatch.setattr(build, "_configure", lambda *_: None)
    monkeypatch.setattr(build, "_load_cache", lambda config, path: None)
    monkeypatch.setattr(build, "_save_cache", lambda cache, path: None)
    with pytest.raises(KeyboardInterrupt):
        build.build_engine(tmp_path / "model.onnx", build.BuildOptions())
    assert built == ["network"]
