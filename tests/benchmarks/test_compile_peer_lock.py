"""The peer takes turns with stof_onnx.trt.turns on one file."""

from __future__ import annotations

import fcntl
import threading

import pytest
from stof_onnx.trt import cuda, turns

pytest.importorskip("torch")

from benchmarks.compile_peer import locked


def test_a_peer_s_timing_waits_for_builds_and_is_not_overtaken(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "identity", lambda: "test")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    order: list[str] = []

    def peer():
        with locked(turns.lock_file(), fcntl.LOCK_EX):
            order.append("peer")

    def build():
        with turns.building():
            order.append("second build")

    with turns.building():
        timing = threading.Thread(target=peer)
        timing.start()
        timing.join(0.2)
        later = threading.Thread(target=build)
        later.start()
        later.join(0.2)
        order.append("first build")
    timing.join(5)
    later.join(5)
    assert order == ["first build", "peer", "second build"]


def test_compiling_goes_beside_builds(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "identity", lambda: "test")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with turns.building(), locked(turns.lock_file(), fcntl.LOCK_SH):
        pass
    with locked(None, fcntl.LOCK_EX):
        pass
