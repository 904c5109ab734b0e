"""Engines for tests on a machine with TensorRT and a GPU: built once a test session, by the command.

STOF_TEST_ENGINES names a folder in which several sessions, one after the other or side by side, share them.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from stof_onnx import cli
from stof_onnx.trt.availability import why_no_engine
from stof_onnx.trt.manifest import manifest_of
from stof_onnx.verify.session import Runner

from benchmarks.encoder import EncoderSpec, build_encoder

MARKS = [pytest.mark.trt, pytest.mark.gpu, pytest.mark.skipif(bool(why_no_engine()), reason=why_no_engine())]
SEQ, HIDDEN = 512, 128
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Engines:
    """One model of dynamic batch and sequence with a window mask, and its engines."""

    folder: Path
    model: Path
    proto: onnx.ModelProto
    embedded: Path
    _outside: Path | None = field(default=None)

    @staticmethod
    def build(folder: Path) -> Engines:
        q, k = np.arange(SEQ)[:, None], np.arange(SEQ)[None]
        proto = build_encoder(EncoderSpec(2, HIDDEN, 2, "batch", "seq", seed=3), (k <= q) & (q - k < 100))
        folder = Path(os.environ.get("STOF_TEST_ENGINES") or folder)
        folder.mkdir(parents=True, exist_ok=True)
        engines = Engines(folder, folder / "model.onnx", proto, folder / "model.stof.engine")
        engines._once(engines.embedded)
        return engines

    def _once(self, engine: Path, *options: str) -> None:
        """Builds `engine` unless it is there: its manifest is the last thing that the command writes."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.model.exists():
                onnx.save(self.proto, str(self.model))
            if not manifest_of(engine).exists():
                self.optimize("--engine", str(engine), *options)

    def optimize(self, *options: str) -> dict[str, object]:
        """Runs the command, keeping the engine with plugins; the engine's part of the report, if any."""
        report = Path(tempfile.mkdtemp(dir=self.folder)) / "report.json"
        shape = f"x:1x16x{HIDDEN}:4x256x{HIDDEN}:8x{SEQ}x{HIDDEN}"
        command = ["optimize", str(self.model), "--shape", shape, "--keep", "stof", "--builder-level", "0"]
        cache = ["--timing-cache", str(self.folder / "tactics.bin")]
        assert cli.main([*command, *cache, "--report", str(report), *options]) == 0
        found: dict[str, object] = json.loads(report.read_text(encoding="utf-8"))["engine"] or {}
        assert "--no-engine" in options or found["kept"] == "stof"
        return found

    @property
    def outside(self) -> Path:
        """The engine with its plugin library outside."""
        if self._outside is None:
            self._outside = self.folder / "outside.engine"
            self._once(self._outside, "--no-embed", "--no-verify", "-o", str(self.folder / "o.onnx"))
        return self._outside

    def feeds(self, rng: np.random.Generator, batch: int = 4, seq: int = 256) -> dict[str, np.ndarray]:
        return {"x": rng.standard_normal((batch, seq, HIDDEN), np.float32)}

    def assert_right(self, feeds: dict[str, np.ndarray], got: np.ndarray) -> None:
        """`got` is ONNX Runtime's output of `feeds`, to the rounding of fp16."""
        expected = Runner(self.proto, Path()).run(feeds)["y"]
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() < 4e-3 * np.abs(expected).max()


def run_fresh(
    command: Sequence[str | Path], cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process of its own, without STOF_PLUGIN_LIBRARY unless given."""
    env = {name: value for name, value in os.environ.items() if name != "STOF_PLUGIN_LIBRARY"}
    path = os.pathsep.join(p for p in [str(ROOT / "optimizer"), str(ROOT), os.environ.get("PYTHONPATH", "")] if p)
    env |= {"PYTHONPATH": path, **environment}
    return run_text(command, env=env, cwd=cwd, timeout=120)


def run_text(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Output as text, in whatever locale."""
    quiet = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    return subprocess.run(list(map(str, command)), **quiet, **options)


def run_python(code: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in a Python of its own."""
    return run_fresh([sys.executable, "-c", code, *arguments], **environment)
