"""The engine options of the command, on a machine without TensorRT or without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from stof_onnx import cli
from stof_onnx.trt.availability import why_no_engine

from benchmarks.encoder import EncoderSpec, build_encoder

pytestmark = pytest.mark.skipif(not why_no_engine(), reason="engines can be built here")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(build_encoder(EncoderSpec(1, 32, 4, 1, 64), np.tri(64, dtype=bool)), str(path))
    return path


def test_the_onnx_part_succeeds_and_one_line_says_why_there_is_no_engine(model: Path, capsys: Captured) -> None:
    report = model.with_name("report.json")
    assert cli.main(["optimize", str(model), "--seed", "1", "--report", str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("no engine: ") for line in lines) == 1
    assert model.with_name("model.stof.onnx").is_file()
    assert not list(model.parent.glob("*.engine"))
    assert json.loads(report.read_text())["no_engine"]


def test_no_engine_says_nothing(model: Path, capsys: Captured) -> None:
    assert cli.main(["optimize", str(model), "--no-verify", "--no-engine"]) == 0
    assert "engine" not in capsys.readouterr().out.replace(str(model.parent), "")


@pytest.mark.parametrize("option", [["--engine"], ["--engine", "out.engine"]])
def test_a_demanded_engine_is_an_error_before_any_work(model: Path, option: list[str], capsys: Captured) -> None:
    assert cli.main(["optimize", str(model), *option]) == 2
    assert "no engine can be built here" in capsys.readouterr().err
    assert not model.with_name("model.stof.onnx").exists()


def test_emit_lowered_needs_neither(model: Path, capsys: Captured) -> None:
    lowered = model.with_name("lowered.onnx")
    command = ["optimize", str(model), "--no-verify", "--emit-lowered", str(lowered), "--arch", "80"]
    assert cli.main(command) == 0
    nodes = [n for n in onnx.load(str(lowered)).graph.node if n.op_type == "StofAttention"]
    assert [n.domain for n in nodes] == ["trt.plugins"]
    kernel = {a.name: a for a in nodes[0].attribute}["kernel"].s.decode()
    assert kernel in ("row_wise", "block_sm80")
    printed = capsys.readouterr().out
    assert f": {kernel} " in printed and "predicted" in printed and "derived for NVIDIA A100" in printed


@pytest.mark.parametrize("command", [["bench", "x.engine"], ["verify", "model.onnx", "x.engine"]])
def test_engines_can_not_be_run_here(
    command: list[str], model: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    Path("x.engine").write_bytes(b"an engine")
    assert cli.main(command) == 2
    assert "x.engine" in capsys.readouterr().err


def test_what_an_engine_is_compared_with_is_looked_for_first(model: Path, capsys: Captured) -> None:
    engine = model.with_name("x.engine")
    engine.write_bytes(b"an engine")
    assert cli.main(["bench", str(engine), "--against", str(model.with_name("missing.onnx"))]) == 2
    assert f"{model.with_name('missing.onnx')}: no such file" in capsys.readouterr().err
