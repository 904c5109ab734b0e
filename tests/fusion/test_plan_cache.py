"""Times and plans on disk."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stof_onnx.errors import StofError
from stof_onnx.fusion.plan import read_plan
from stof_onnx.fusion.plan_cache import PlanCache
from stof_onnx.fusion.search import SearchOptions, search
from stof_onnx.fusion.search.roofline import Roofline

from tests.fusion.synthetic import Synthetic, layer_block


def test_a_second_run_measures_nothing(tmp_path: Path) -> None:
    block, first, second = layer_block(), Synthetic(1), Synthetic(1)
    options = SearchOptions(least_gain=0.0)
    plan = search([block], first, "fp16", options, PlanCache(tmp_path / "plans.sqlite"))
    start = time.monotonic()
    again = search([block], second, "fp16", options, PlanCache(tmp_path / "plans.sqlite"))
    assert time.monotonic() - start < 5
    assert not second.asked and again.samples == 0 and again.cached == plan.samples
    assert again.blocks == plan.blocks and again.kept


@pytest.mark.parametrize("change", ["timer", "segment", "config"])
def test_times_are_of_one_key(tmp_path: Path, change: str) -> None:
    cache = PlanCache(tmp_path / "plans.sqlite")
    cache.put("timer", "segment", "config", 2.5)
    key = {"timer": "timer", "segment": "segment", "what": "config"}
    assert cache.get(**key) == 2.5
    key["what" if change == "config" else change] += "2"
    assert cache.get(**key) is None


def test_other_versions_times_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache(tmp_path / "plans.sqlite")
    cache.put("t", "s", "c", 1.0)
    monkeypatch.setattr("stof_onnx.fusion.plan_cache.__version__", "0.0.1")
    assert cache.get("t", "s", "c") is None


@pytest.mark.parametrize("damage", ["garbage", "format", "folder", "truncated", "schema", "values"])
def test_a_damaged_cache_is_ignored_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plans.sqlite"
    good = PlanCache(path)
    for i in range(400):
        good.put("synthetic", f"segment{i}", "c", 1.0)
    good.close()
    if damage == "garbage":
        path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    elif damage == "format":
        sqlite3.connect(path).execute("PRAGMA user_version = 99")
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "schema":  # SQLite repeats it in a message that is not UTF-8 then
        path.write_bytes(path.read_bytes().replace(b"(timer, segment, config)", b"(timer, segment, \xe9onfig)"))
    else:
        with sqlite3.connect(path) as db:
            db.execute("UPDATE times SET us = 'soon'")
    cache, timer = PlanCache(path), Synthetic(1)
    plan = search([layer_block()], timer, "fp16", SearchOptions(), cache)
    assert plan.complete and timer.asked
    if damage != "values":
        assert cache.problem and cache.problem in caplog.text
    assert cache.get("synthetic", "segment0", "c") is None


def test_several_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plans.sqlite"
    code = (
        "import sys; from pathlib import Path; from stof_onnx.fusion.plan_cache import PlanCache\n"
        "cache = PlanCache(Path(sys.argv[1]))\n"
        "for i in range(100): cache.put('t', f'{sys.argv[2]}-{i}', 'c', float(i))\n"
        "sys.exit(bool(cache.problem))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)], env=environment) for n in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    cache = PlanCache(path)
    assert [cache.get("t", f"{n}-{i}", "c") for n in range(3) for i in range(100)] == [float(i) for i in range(100)] * 3


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = search([layer_block()], Synthetic(1), "fp16", SearchOptions())
    path = tmp_path / "plan.json"
    plan.write(path)
    assert read_plan(path) == plan
    path.write_text(json.dumps({"fusion": {"plan": plan.to_json()}}))
    assert read_plan(path) == plan, "a report holds the plan as well"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"blocks": [], "format": 7}', '{"blocks": [{}], "format": 1}'])
def test_what_is_no_plan_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(StofError, match="plan"):
        read_plan(path)


def test_a_report_without_a_plan_says_so(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for fusion in (None, {"plan": None, "reason": "no attention was replaced"}):
        path.write_text(json.dumps({"command": "optimize", "fusion": fusion}))
        with pytest.raises(StofError, match=r"not a fusion plan \(no 'format'\)"):
            read_plan(path)


def test_the_roofline_says_what_it_is() -> None:
    """Without a GPU: estimates for a real layer's sizes, and regions where they save passes over memory."""
    block = layer_block(width=768)
    plan = search([block], Roofline(), "fp16", SearchOptions())
    assert plan.timer.startswith("roofline")
    (planned,) = plan.blocks.values()
    assert 0 < planned.planned_us <= planned.left_us
    assert Roofline(arch=80).name != Roofline().name
    old = search([block], Roofline(arch=80), "fp16", SearchOptions())
    kinds = {r.template for p in old.blocks.values() for r in p.regions if r.kept}
    assert not kinds & {"gemm_epilogue", "gated_mlp"}, "the GEMM templates need compute capability 9.0"


_NOT_PLANS: list[tuple[str, list[str | int], object]] = [
    ("seconds", ["seconds"], "soon"),
    ("timer", ["timer"], ["a"]),
    ("complete", ["complete"], 1),
    ("count", ["blocks", 0, "count"], "2"),
    ("fused_us", ["blocks", 0, "regions", 0, "fused_us"], "3.0"),
    ("left_us", ["blocks", 0, "regions", 0, "left_us"], True),
    ("start", ["blocks", 0, "regions", 0, "start"], 0.0),
    ("kept", ["blocks", 0, "regions", 0, "kept"], "yes"),
    ("operators", ["blocks", 0, "regions", 0, "operators"], [1]),
    ("reason", ["blocks", 0, "regions", 0, "reason"], {"a": 1}),
]


@pytest.mark.parametrize(("name", "at", "value"), _NOT_PLANS, ids=[n for n, _, _ in _NOT_PLANS])
def test_values_of_a_wrong_type_are_no_plan(tmp_path: Path, name: str, at: list[str | int], value: object) -> None:
    plan = search([layer_block()], Synthetic(1), "fp16", SearchOptions(least_gain=0.0)).to_json()
    plan = json.loads(json.dumps(plan))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert read_plan(path).kept
    place: Any = plan
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    path.write_text(json.dumps(plan))
    with pytest.raises(StofError, match=f"not a fusion plan .{name} is"):
        read_plan(path)


def test_kept_regions_that_overlap_are_no_plan(tmp_path: Path) -> None:
    plan = search([layer_block()], Synthetic(1), "fp16", SearchOptions(least_gain=0.0)).to_json()
    regions = list(plan["blocks"][0]["regions"])
    regions += [r for r in regions if r["kept"]][:1]
    plan["blocks"][0]["regions"] = regions
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(StofError, match="overlap"):
        read_plan(tmp_path / "plan.json")


def test_endless_nesting_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[" * 100_000)
    with pytest.raises(StofError, match="not a fusion plan"):
        read_plan(tmp_path / "plan.json")
