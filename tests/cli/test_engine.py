"""The engine options of the command, on a machine without TensorRT or without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from polygraphy.json import save_json
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


@pytest.mark.parametrize("arch", ["90", "sm_90"])
def test_emit_lowered_takes_both_names_of_an_architecture(model: Path, arch: str) -> None:
    lowered = model.with_name("lowered.onnx")
    assert cli.main(["optimize", str(model), "--no-verify", "--emit-lowered", str(lowered), "--arch", arch]) == 0
    assert lowered.is_file()


def test_sizes_without_bounds_are_refused_before_anything_is_written(model: Path, capsys: Captured) -> None:
    proto = onnx.load(str(model))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(proto, str(model))
    command = ["optimize", str(model), "--no-verify", "--emit-lowered", str(model.with_name("lowered.onnx"))]
    assert cli.main(command) == 2
    printed = capsys.readouterr().err
    assert "TensorRT profile: axis 0 of the input 'x' has no bounds. Give --shape x:MIN:OPT:MAX" in printed
    assert [p.name for p in model.parent.iterdir()] == [model.name]
    assert cli.main([*command, "--shape", "x:1x64x32:4x64x32"]) == 0
    assert model.with_name("lowered.onnx").is_file()


def test_an_engine_and_none_can_not_both_be_asked_for(model: Path, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["optimize", str(model), "--engine", "--no-engine"])
    assert stopped.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_the_name_of_an_engine_is_none_for_the_model(model: Path, capsys: Captured) -> None:
    assert cli.main(["optimize", str(model), "-o", str(model.with_suffix(".engine"))]) == 2
    assert "Name the engine with --engine FILE" in capsys.readouterr().err
    assert [p.name for p in model.parent.iterdir()] == [model.name]


def test_outputs_that_nothing_was_compared_with_are_noted(model: Path, capsys: Captured) -> None:
    inputs, outputs = model.with_name("in.json"), model.with_name("out.json")
    save_json([{"x": np.zeros((1, 64, 32), np.float32)}], str(inputs))
    save_json([{"y": np.zeros((1, 64, 32), np.float32)}], str(outputs))
    command = ["optimize", str(model), "--load-inputs", str(inputs), "--load-outputs", str(outputs)]
    assert cli.main(command) == 0
    assert "note: --load-outputs was not used: it is for engines" in capsys.readouterr().out
    assert cli.main([*command, "--no-engine"]) == 2
    assert "--load-outputs: is for engines" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--load-inputs", "--load-outputs"])
def test_files_of_a_comparison_are_looked_for_first(model: Path, option: str, capsys: Captured) -> None:
    inputs, missing = model.with_name("in.json"), model.with_name("missing.json")
    inputs.write_text("[]", encoding="utf-8")
    files = {"--load-inputs": inputs, option: missing}
    options = [word for name, file in files.items() for word in (name, str(file))]
    assert cli.main(["optimize", str(model), "--no-verify", *options]) == 2
    assert f"{missing}: no such file" in capsys.readouterr().err
    assert not model.with_name("model.stof.onnx").exists()


@pytest.mark.parametrize("suffix", [".engine", ".plan", ".trt"])
@pytest.mark.parametrize("command", [["bench", "x"], ["verify", "model.onnx", "x"]])
def test_engines_can_not_be_run_here(
    command: list[str], suffix: str, model: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    Path(f"x{suffix}").write_bytes(b"an engine")
    assert cli.main([*command[:-1], f"x{suffix}"]) == 2
    assert f"x{suffix}: {why_no_engine()}" in capsys.readouterr().err


def test_what_an_engine_is_compared_with_is_looked_for_first(model: Path, capsys: Captured) -> None:
    engine = model.with_name("x.engine")
    engine.write_bytes(b"an engine")
    assert cli.main(["bench", str(engine), "--against", str(model.with_name("missing.onnx"))]) == 2
    assert f"{model.with_name('missing.onnx')}: no such file" in capsys.readouterr().err
