"""Files of inputs and outputs, as polygraphy writes them and as its library saves plain lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from polygraphy.json import save_json
from stof_onnx import cli
from stof_onnx.errors import StofError
from stof_onnx.verify.loaded import loaded_outputs, loaded_samples
from stof_onnx.verify.session import Runner

from benchmarks.encoder import EncoderSpec, build_encoder

MODEL = build_encoder(EncoderSpec(1, 16, 2, 2, 8), np.tri(8, dtype=bool))


def test_what_polygraphy_run_saves(tmp_path: Path) -> None:
    onnx.save(MODEL, str(tmp_path / "m.onnx"))
    command = [sys.executable, "-c", "from polygraphy.tools import main; main()", "run", "m.onnx", "--onnxrt",
               "--iterations", "2", "--save-inputs", "in.json", "--save-outputs", "out.json"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    feeds = [sample.feeds for sample in loaded_samples(tmp_path / "in.json", MODEL)]
    outputs = loaded_outputs(tmp_path / "out.json", ["y"], 2)
    runner = Runner(MODEL, tmp_path)
    for one, found in zip(feeds, outputs, strict=True):
        np.testing.assert_allclose(found["y"], runner.run(one)["y"], atol=1e-5)


def test_plain_lists_and_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    save_json([{"y": np.ones(3)}, {"y": np.zeros(3), "z": np.zeros(1)}], str(path))
    assert [found["y"].sum() for found in loaded_outputs(path, ["y"], 2)] == [3.0, 0.0]
    with pytest.raises(StofError, match="2 sets of outputs for 1 of inputs"):
        loaded_outputs(path, ["y"], 1)
    with pytest.raises(StofError, match=r"set 0 does not hold the outputs \['y', 'z'\]"):
        loaded_outputs(path, ["y", "z"], 2)
    path.write_text("y = 1")
    with pytest.raises(StofError, match=r"not a polygraphy JSON file.*--save-outputs"):
        loaded_outputs(path, ["y"], 1)


def test_outputs_belong_to_inputs_and_to_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = tmp_path / "m.onnx", tmp_path / "out.json"
    onnx.save(MODEL, str(model))
    save_json([{"y": np.ones(3)}], str(path))
    for command in (["optimize", str(model)], ["verify", str(model), str(tmp_path / "m.engine")]):
        assert cli.main([*command, "--load-outputs", str(path)]) == 2
        assert "Give --load-inputs as well" in capsys.readouterr().err
    both = ["--load-inputs", str(path), "--load-outputs", str(path)]
    assert cli.main(["verify", str(model), str(model), *both]) == 2
    assert "is for engines" in capsys.readouterr().err
