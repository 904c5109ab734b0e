"""`stof-onnx kernels compile`: what it leaves, refuses, and how it stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stof_onnx import cli
from stof_onnx.kernels.triton_rows import configurations, norm_program
from stof_onnx.kernels.triton_rows.cache import triton_version

Captured = pytest.CaptureFixture[str]
needs_triton = pytest.mark.skipif(triton_version() is None, reason="needs triton")
PROGRAM = norm_program("rms_norm", 64, "fp16", add=False)


@needs_triton
def test_programs_are_compiled_once(tmp_path: Path, capsys: Captured) -> None:
    listed, folder = tmp_path / "programs.jsonl", tmp_path / "kernels"
    listed.write_text(f"{PROGRAM.to_json()}\n\n{PROGRAM.to_json()}\n")
    arguments = ["kernels", "compile", str(listed), "--arch", "90", "--jobs", "2", "-o", str(folder)]
    count = 2 * len(configurations(PROGRAM))
    for compiled in (count, 0):
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        assert out == f"{count} kernels of 1 programs, {compiled} of them compiled now: {folder}\n"
    assert len(list(folder.rglob("*.kernel"))) == count


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "nothing to compile"),
        ("", "nothing to compile"),
        ("no json", "is no row program"),
        (json.dumps({"cols": 8, "inputs": [], "ops": [], "outputs": []}), "needs an input"),
        (norm_program("rms_norm", 1 << 16, "fp32", add=False).to_json(), "too long"),
    ],
)
def test_what_is_refused(content: str | None, message: str, tmp_path: Path, capsys: Captured) -> None:
    files = []
    if content is not None:
        files = [str(tmp_path / "programs.jsonl")]
        Path(files[0]).write_text(content, encoding="utf-8")
    assert cli.main(["kernels", "compile", *files, "-o", str(tmp_path / "kernels")]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "kernels").exists()


@needs_triton
@pytest.mark.parametrize(("signal_", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_an_interrupted_run_leaves_whole_kernels_only(signal_: signal.Signals, code: int, tmp_path: Path) -> None:
    folder, scratch = tmp_path / "kernels", tmp_path / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "stof_onnx.cli", "kernels", "compile", "--width", "768", "-o", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(scratch)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(list(folder.rglob("*.kernel"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal_)
        _, error = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in error
    kernels = list(folder.rglob("*"))
    assert len([p for p in kernels if p.suffix == ".kernel"]) >= 2
    assert not [p for p in kernels if p.is_file() and p.suffix != ".kernel"]
    assert not list(scratch.iterdir()), "the compiling processes left their folders"
