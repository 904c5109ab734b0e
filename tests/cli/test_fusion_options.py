"""--tune-budget, --no-tune and --plan: what a user gets when a search is interrupted, and of plans and caches."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from stof_onnx import cli
from stof_onnx.fusion.plan import read_plan
from stof_onnx.trt import fusion_step

from benchmarks.encoder import EncoderSpec, build_encoder
from tests.fusion.synthetic import Synthetic

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two layers, and a cache folder of their own."""
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))
    return _model(tmp_path / "m.onnx")


def _model(path: Path, width: int = 64) -> Path:
    onnx.save(build_encoder(EncoderSpec(2, width, 4, 2, 64), np.tril(np.ones((64, 64), bool))), str(path))
    return path


def _optimize(source: Path, *options: object) -> int:
    return cli.main(["optimize", str(source), "--no-engine", "--no-verify", *map(str, options)])


def _use(timer: Synthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_step, "_timer", lambda *_: timer)


def test_ctrl_c_keeps_the_best_so_far(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """The run goes on with it, says so, and the plan it wrote makes the same model again."""
    _use(Synthetic(2, share=(0.1, 0.2), interrupt_after=20), monkeypatch)
    plan = source.with_name("plan.json")
    assert _optimize(source, "--tune-budget", "60s", "--plan", plan) == 0
    assert "ended early: the best so far" in capsys.readouterr().out
    written = read_plan(plan)
    assert not written.complete and written.kept
    first = source.with_name("m.stof.onnx").read_bytes()
    _use(Synthetic(2, interrupt_after=1), monkeypatch)
    assert _optimize(source, "--no-tune", "--plan", plan) == 0
    assert source.with_name("m.stof.onnx").read_bytes() == first


def test_a_budget_of_nothing_keeps_nothing(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    _use(timer := Synthetic(2, share=(0.1, 0.2), seconds=10.0), monkeypatch)
    assert _optimize(source, "--tune-budget", "1s") == 0
    assert "ended early" in capsys.readouterr().out and sum(timer.asked.values()) == 1


def test_a_second_search_is_served_from_the_cache(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for _ in range(2):
        _use(timer := Synthetic(2, share=(0.1, 0.9)), monkeypatch)
        assert _optimize(source, "--tune-budget", "60s") == 0
        made.append((sum(timer.asked.values()), source.with_name("m.stof.onnx").read_bytes()))
    assert made[0][0] > 0 == made[1][0] and made[0][1] == made[1][1]


def test_a_damaged_cache_is_one_warning(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = fusion_step.default_path()
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"no database" * 1000)
    _use(timer := Synthetic(2, share=(0.1, 0.9)), monkeypatch)
    assert _optimize(source, "--tune-budget", "60s") == 0
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and str(cache) in warnings[0] and timer.asked
    assert cache.read_bytes().startswith(b"no database"), "it is left as it was"


def test_the_terminal_says_what_became_of_each_region(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    _use(Synthetic(2, share=(0.1, 0.2)), monkeypatch)
    plan = source.with_name("plan.json")
    assert _optimize(source, "--tune-budget", "60s", "--plan", plan) == 0
    value = json.loads(plan.read_text())
    region = value["blocks"][0]["regions"][0] | {"kept": False}
    times = [(5.0, 4.0, "TensorRT is faster"), (5.0, None, "another choice"), (None, None, "it does not run")]
    for block in value["blocks"]:
        block["regions"] = []
    value["blocks"][0]["regions"] = [
        region | {"hash": reason, "fused_us": fused, "left_us": left, "reason": reason} for fused, left, reason in times
    ]
    plan.write_text(json.dumps(value))
    capsys.readouterr()
    assert _optimize(source, "--no-tune", "--plan", plan) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    not kept: ")]
    what = f"    not kept: {', '.join(region['operators'])}: {region['template']} {region['config']}, "
    assert [line.removeprefix(what) for line in lines] == [
        *("5.0 µs, by TensorRT 4.0 µs: TensorRT is faster", "5.0 µs: another choice", "not timed: it does not run")
    ]


@pytest.mark.parametrize("damage", ["truncated", "other json", "no region of that block", "long config", "precision"])
def test_a_wrong_plan_says_what_is_wrong(
    source: Path, damage: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """And writes no model."""
    _use(Synthetic(2, share=(0.1, 0.2)), monkeypatch)
    plan = source.with_name("plan.json")
    assert _optimize(source, "--tune-budget", "60s", "--plan", plan, "-o", source.with_name("first.onnx")) == 0
    value = json.loads(plan.read_text())
    value["blocks"][0]["regions"][0]["stop"] = 1000
    long = json.loads(plan.read_text())
    long["blocks"][0]["regions"][0]["config"] = "x" * 32
    texts = {
        "truncated": plan.read_text()[:100],
        "other json": '{"a": 1}',
        "no region of that block": json.dumps(value),
        "long config": json.dumps(long),
    }
    plan.write_text(texts.get(damage, plan.read_text()))
    capsys.readouterr()
    precision = "bf16" if damage == "precision" else "fp16"
    assert _optimize(source, "--no-tune", "--plan", plan, "--precision", precision) != 0
    error = capsys.readouterr().err
    assert str(plan) in error and ("not a fusion plan" in error or "is for fp16, the engine is bf16" in error)
    assert not source.with_name("m.stof.onnx").exists()


def test_a_scheme_of_another_length_is_of_no_block(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited by hand: its regions agree with it, but not with the operators that its hash stands for."""
    _use(Synthetic(2, share=(0.1, 0.2)), monkeypatch)
    plan = source.with_name("plan.json")
    assert _optimize(source, "--tune-budget", "60s", "--plan", plan) == 0
    value = json.loads(plan.read_text())
    for block in value["blocks"]:
        block["regions"] = [r | {"start": 1000, "stop": 1002} for r in block["regions"][:1]]
        block["bits"] += "01" * 600
    plan.write_text(json.dumps(value))
    assert _optimize(source, "--no-tune", "--plan", plan) == 0
    functions = onnx.load(str(source.with_name("m.stof.onnx"))).functions
    assert not any(f.name.startswith("StofFusedRegion") for f in functions)


def test_a_plan_of_another_model_is_said_to_be_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    _use(Synthetic(2, share=(0.1, 0.2)), monkeypatch)
    plan = tmp_path / "plan.json"
    assert _optimize(source, "--tune-budget", "60s", "--plan", plan) == 0
    other = _model(tmp_path / "other.onnx", width=128)
    assert _optimize(other, "--no-tune", "--plan", plan) == 0
    assert "no fused regions: the plan is of other models or sizes" in capsys.readouterr().out
    assert not any(f.name.startswith("StofFusedRegion") for f in onnx.load(str(tmp_path / "other.stof.onnx")).functions)


def test_the_report_says_why_of_every_region(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Operators, template, configuration, both times, and why: kept ones gain, and the terminal lists them."""
    _use(Synthetic(4, share=(0.3, 1.1)), monkeypatch)
    report = source.with_name("report.json")
    assert _optimize(source, "--tune-budget", "60s", "--report", report) == 0
    printed = capsys.readouterr().out
    blocks = json.loads(report.read_text())["fusion"]["plan"]["blocks"]
    regions = [region for block in blocks for region in block["regions"]]
    assert {True, False} == {region["kept"] for region in regions}
    for region in regions:
        assert region["operators"] and region["template"] and region["config"] and region["reason"]
        assert region["fused_us"] > 0
        assert not region["kept"] or region["fused_us"] < region["left_us"]
        assert f"{region['template']} {region['config']}" in printed
    assert all(block["planned_us"] <= block["left_us"] for block in blocks)
