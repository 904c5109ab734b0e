"""The benchmark of the command on real exports, with the command and the GPU stood in for."""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from polygraphy.json import load_json
from stof_onnx.fusion.plan import FusionPlan
from stof_onnx.graph.read import read_proto
from stof_onnx.trt import availability, cuda
from stof_onnx.trt.build import BuiltEngine
from stof_onnx.trt.choose import Candidate, EngineResult, Race
from stof_onnx.trt.compare import EngineError
from stof_onnx.trt.lower import Lowered
from stof_onnx.trt.plugin_nodes import SiteLowering
from stof_onnx.trt.session import Timing
from stof_onnx.verify.session import Runner

from benchmarks import real_models

pytest.importorskip("torch")
pytest.importorskip("transformers")


def candidate(kind: str, ms: float, error: float, lowered: Lowered | None = None) -> Candidate:
    timing = Timing(ms, ms, ms, True, 10)
    return Candidate(kind, BuiltEngine(b"x", 1.0), EngineError(error, error, 0), timing, 1 << 20, lowered=lowered)


@pytest.fixture
def commands(monkeypatch):
    """What was run. The command's engine is a file of the name of the model; the example runs that on ONNX Runtime."""
    seen: list[list[str]] = []

    def process(command: list[object], cwd: Path, pausing: object = None) -> None:
        words = list(map(str, command))
        seen.append(words)
        if "optimize" in words:
            model, given = Path(words[words.index("optimize") + 1]), dict(pairwise(words))
            (feeds,), (outputs,) = load_json(given["--load-inputs"]), load_json(given["--load-outputs"])
            assert len(outputs["last_hidden_state"]) == 1 and len(next(iter(feeds.values()))) == 2
            Path(given["--engine"]).write_text(str(model), encoding="utf-8")
            lowered = Lowered(
                read_proto(model), [SiteLowering("a", "block_sm90", mask_bytes=100, dense_mask_bytes=1024)]
            )
            race = Race(candidate("plain", 3.0, 1e-3), candidate("stof", 2.0, 2e-3, lowered))
            report: dict[str, object] = {}
            if "--tune-budget" in words:
                race.fused = candidate("fused", 1.5, 2e-3, lowered)
                report["fusion"] = {"plan": FusionPlan("a timer", "fp16", {}).to_json(), "regions": [{}, {}]}
            report["engine"] = EngineResult(Path(given["--engine"]), "stof", race).to_json()
            Path(given["--report"]).write_text(json.dumps(report), encoding="utf-8")
        else:
            script = next(i for i, word in enumerate(words) if word.endswith("run_engine.py"))
            model = Path(Path(words[script + 1]).read_text(encoding="utf-8"))
            feeds = {name: np.load(file) for name, _, file in (word.partition("=") for word in words[script + 2 :])}
            for name, value in Runner(read_proto(model), model.parent).run(feeds).items():
                np.save(cwd / f"{name}.npy", value)

    monkeypatch.setattr(real_models, "_process", process)
    monkeypatch.setattr(real_models, "_process_of", lambda _: ThreadPoolExecutor(1))  # sees what is patched here
    monkeypatch.setattr(cuda, "name", lambda: "a GPU")
    monkeypatch.setattr(cuda, "identity", lambda: "a-gpu")
    monkeypatch.setattr(availability, "tensorrt", lambda: SimpleNamespace(__version__="8.6.0"))
    return seen


@pytest.mark.parametrize("name, tuned", [("gpt2-causal", None), ("vit", "9s")])
def test_a_model_goes_from_export_to_a_line(name, tuned, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(real_models, "HIDDEN", 32)
    monkeypatch.setattr(real_models, "HEADS", 4)
    real_models.export(f"{name}:2x16x1", tmp_path)
    (path,) = (p for p in tmp_path.glob("*.onnx") if ".one." not in p.name)
    arguments = argparse.Namespace(
        commit="abc",
        timing_cache=None,
        tune_budget=tuned,
        in_process=False,
        timeout=None,
        half_io=False,
        initial_plan=False,
    )
    built = real_models.build(path, real_models.prepare(path, seed=1), arguments)
    line, *more = real_models.finish(built, arguments)
    assert not built.work.exists()
    assert (line["model"], line["B"], line["layers"]) == (name, 2, 1)
    assert line["S"] == (16 if name != "vit" else 17)
    assert line["mask"] == ("causal" if name != "vit" else "none")
    assert (line["plain_ms"], line["stof_ms"], line["speedup"], line["kept"]) == (3.0, 2.0, 1.5, "stof")
    assert (line["err_plain"], line["err_stof"], line["mask_bytes"]) == (1e-3, 2e-3, 100)
    assert line["err_loaded"] < 1e-5, "the twin of one entry has the weights of the model"
    assert line["verified"] and "--no-verify" not in commands[0]
    assert len(commands) == 2 and "-I" in commands[1]
    assert len(more) == (tuned is not None) and not line["fusion"]
    for fused in more:
        assert (fused["fusion"], fused["stof_ms"], fused["attention_ms"], fused["gain"]) == (True, 1.5, 2.0, 1.333)
        assert (fused["speedup"], fused["regions"], fused["tuning"]["timer"]) == (2.0, 2, "a timer")
    json.dumps([line, *more])


def test_models_are_run_in_turn_and_failures_are_lines(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(real_models, "HIDDEN", 32)
    monkeypatch.setattr(real_models, "HEADS", 4)
    real_models.export("gpt2-causal:2x16x1", tmp_path)
    models, out = [tmp_path / "gpt2-causal-2x16x1.onnx", tmp_path / "missing.onnx"], tmp_path / "lines.jsonl"
    monkeypatch.setattr("sys.argv", ["real_models", "run", *map(str, models), "--out", str(out), "--half-io"])
    assert real_models.main() == 1
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    early, done = (line for line in lines if "failed" not in line)
    assert early == done | {"err_loaded": None, "date": early["date"]} and done["err_loaded"] < 1e-2
    assert (done["model"], done["half_io"], done["kept"]) == ("gpt2-causal", True, "stof")
    assert "--half-io" in commands[0]
    assert [line["model"] for line in lines if "failed" in line] == ["missing"]


def test_a_slot_goes_on_after_a_build_without_end_and_a_crash():
    slot = real_models.Slot()
    first = slot.call(None, os.getpid)
    with pytest.raises(RuntimeError, match=r"not done after 0\.2 s"):
        slot.call(0.2, time.sleep, 60)
    second = slot.call(None, os.getpid)
    with pytest.raises(RuntimeError, match="died"):
        slot.call(None, os._exit, 3)
    third = slot.call(None, os.getpid)
    slot.process.shutdown()
    assert len({first, second, third, os.getpid()}) == 4


def test_an_engine_with_rotations_needs_no_plan():
    engine = {"plain": {"ms": 3.0, "build_s": 1.0}, "stof": {"ms": 2.0}, "regions": [{}, {}, {}]}
    engine["fused"] = {"ms": 1.5, "cuda_graph": True, "memory_mb": 1, "error": None, "build_s": 2.0, "problem": ""}
    line = real_models._fused({"engine": engine, "fusion": None})
    assert (line["speedup"], line["gain"], line["regions"], line["region_us"]) == (2.0, 1.333, 3, {})
    assert set(line["tuning"].values()) == {None}
