"""`stof-onnx export` as users call it: what it writes, and one clear message with exit code 2 for bad input."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from stof_models.info import ExportInfo
from stof_models.masks import make_mask
from stof_onnx.cli import main

SMALL = ["--seq", "32", "--hidden", "32", "--heads", "2", "--layers", "1"]


def test_writes_model_and_declaration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bert.onnx"
    assert main(["export", "bert", "--mask", "window", "--width", "3", "--padding", *SMALL, "-o", str(path)]) == 0
    assert "1 attention site" in capsys.readouterr().out
    assert sorted(f.name for f in tmp_path.iterdir()) == ["bert.json", "bert.onnx"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    info = ExportInfo.load(tmp_path / "bert.json")
    want = make_mask("window", 32, width=3).dense()
    assert np.array_equal(info.sites[0].expected_mask(info.dims), want)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["input_ids", "attention_mask"]
    session.run(None, info.random_inputs(np.random.default_rng(0)))
    assert onnx.load(str(path)).opset_import[0].version == 17


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "vit.onnx"
    path.write_bytes(b"old")
    assert main(["export", "vit", "--seq", "16", "--hidden", "16", "--layers", "1", "-o", str(path)]) == 0
    onnx.checker.check_model(str(path))


@pytest.mark.parametrize(
    "arguments",
    [["gpt2", "--dtype", "fp16"], ["gpt2", "--opset", "13"], ["gemma2"], ["gemma2", "--exporter", "dynamo"]],
)
def test_attention_is_chosen_so_that_the_model_runs(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    assert main(["export", *arguments, *SMALL, "-o", str(path)]) == 0
    info = ExportInfo.load(tmp_path / "model.json")
    assert info.options["attention"] == "eager"
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert all(np.isfinite(output).all() for output in session.run(None, info.random_inputs(np.random.default_rng(0))))


def test_a_failing_exporter_prints_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--attention", "sdpa", "--opset", "13", *SMALL, "-o", str(tmp_path / "model.onnx")]
    assert main(["export", "gpt2", *options]) == 2
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "scaled_dot_product_attention" in printed.err and list(tmp_path.iterdir()) == []


def test_attention_asked_for_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    assert main(["export", "gemma2", "--attention", "sdpa", *SMALL, "-o", str(path)]) == 2
    assert "has no sdpa attention" in capsys.readouterr().err
    assert main(["export", "gpt2", *SMALL, "-o", str(path)]) == 0
    assert ExportInfo.load(tmp_path / "model.json").options["attention"] == "sdpa"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["albert"], "albert"),
        (["bert", "--mask", "diagonal"], "diagonal"),
        (["bert", "--mask", "window", "--width", "wide"], "--width"),
        (["bert", "--mask", "window", "--width", "-3"], "--width must be at least 0, got -3"),
        (["bert", "--mask", "dilated", "--dilation", "0"], "--dilation must be at least 1"),
        (["bert", "--mask", "bigbird", "--block", "0"], "--block must be at least 1"),
        (["bert", "--mask", "bigbird", "--random-blocks", "-1"], "--random-blocks must be at least 0"),
        (["bert", "--mask", "longformer", "--global-tokens", "-1"], "--global-tokens must be at least 0"),
        (["bert", "--mask", "random", "--density", "2"], "0 to 1, got 2"),
        (["bert", "--mask", "random", "--density", "nan"], "0 to 1, got nan"),
        (["bert", "--width", "3"], "--width is for --mask window"),
        (["bert", "--mask", "block-diagonal", "--block", "8"], "--block is for --mask bigbird"),
        (["bert", "--intermediate", "-4"], "--intermediate must be at least 0"),
        (["bert", "--seed", "-1"], "--seed must be at least 0"),
        (["bert", "--opset", "9"], "opset"),
        (["bert", "--exporter", "dynamo", "--opset", "17"], "opsets 18 to"),
        (["bert", "--hidden", "33", "--heads", "2"], "not a multiple"),
        (["bert", "--heads", "0"], "at least 1"),
        (["swin", "--mask", "window"], "takes no mask"),
        (["vit", "--seq", "40"], "should be 36 or 49"),
        (["bert", "-o", "missing/bert.onnx"], "missing does not exist"),
        (["bert", "-o", "."], "is a folder"),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["export", *arguments])
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    assert code == 2
    assert message in printed.err and "Traceback" not in printed.err
    assert list(tmp_path.iterdir()) == []


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
