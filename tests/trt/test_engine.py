"""Engines on a machine with TensorRT, a GPU and a plugin library; skipped elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from stof_onnx import cli
from stof_onnx.trt import cuda
from stof_onnx.trt.availability import why_no_engine
from stof_onnx.trt.session import EngineSession
from stof_onnx.verify.session import Runner

from benchmarks.encoder import EncoderSpec, build_encoder

pytestmark = [pytest.mark.trt, pytest.mark.gpu, pytest.mark.skipif(bool(why_no_engine()), reason=why_no_engine())]
SEQ, HIDDEN = 512, 256
SIZES = ((1, 16), (4, 256), (8, SEQ), (3, 77), (8, 129), (1, SEQ))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, onnx.ModelProto]:
    """An engine of dynamic batch and sequence, with the model it came from."""
    folder = tmp_path_factory.mktemp("engine")
    q, k = np.arange(SEQ)[:, None], np.arange(SEQ)[None]
    model = build_encoder(EncoderSpec(2, HIDDEN, 4, "batch", "seq", seed=3), (k <= q) & (q - k < 100))
    onnx.save(model, str(folder / "model.onnx"))
    engine = folder / "model.stof.engine"
    shape = f"x:1x16x{HIDDEN}:4x256x{HIDDEN}:8x{SEQ}x{HIDDEN}"
    command = ["optimize", str(folder / "model.onnx"), "--shape", shape, "--engine", str(engine), "--keep", "stof"]
    assert cli.main([*command, "--builder-level", "0", "--report", str(folder / "report.json")]) == 0
    found = json.loads((folder / "report.json").read_text())["engine"]
    assert found["kept"] == "stof"
    assert found["packed"] == 2
    return engine, model


def test_one_engine_serves_every_size_of_its_profile(built, rng):
    engine, model = built
    session, runner = EngineSession(engine), Runner(model, Path())
    for batch, seq in SIZES:
        feeds = {"x": rng.standard_normal((batch, seq, HIDDEN), np.float32)}
        expected, got = runner.run(feeds)["y"], session.run(feeds)["y"]
        assert np.abs(got - expected).max() < 4e-3 * np.abs(expected).max()


def test_two_contexts_at_once(built, rng):
    engine, _ = built
    sessions = [EngineSession(engine) for _ in range(2)]
    feeds = [{"x": rng.standard_normal((b, s, HIDDEN), np.float32)} for b, s in ((8, SEQ), (5, 300))]
    alone = [s.run(f)["y"] for s, f in zip(sessions, feeds, strict=True)]
    for session, one in zip(sessions, feeds, strict=True):
        session.bind(one)
    for _ in range(200):
        for session in sessions:
            session.execute()
    cuda.call("cudaDeviceSynchronize")
    for session, expected in zip(sessions, alone, strict=True):
        np.testing.assert_array_equal(session.fetch()["y"], expected)


def test_many_inferences_take_no_memory(built, rng):
    session = EngineSession(built[0])
    session.run({"x": rng.standard_normal((4, 256, HIDDEN), np.float32)})
    before = cuda.free_memory()
    for _ in range(10_000):
        session.execute()
    cuda.call("cudaDeviceSynchronize")
    assert before - cuda.free_memory() <= 0


def test_a_fresh_process_needs_no_library(built):
    engine, _ = built
    env = {k: v for k, v in os.environ.items() if k != "STOF_PLUGIN_LIBRARY"}
    command = [sys.executable, "-m", "stof_onnx.cli", "verify", str(engine.with_name("model.onnx")), str(engine)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
