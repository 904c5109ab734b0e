"""benchmarks.fusion_plans, with TensorRT and the GPU stood in for as in test_end_to_end."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import onnx
from stof_onnx.fusion.plan import read_plan
from stof_onnx.fusion.search import Measurement
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.trt import fusion_step, region_nodes
from stof_onnx.trt.session import Timing
from stof_onnx.verify.session import Runner

from benchmarks import fusion_plans
from benchmarks.fusion_columns import Subject
from benchmarks.fusion_plans import initial_of, prepare_both, searched
from tests.benchmarks.test_end_to_end import BUILDS, MODELS, arguments  # noqa: F401  (a fixture)
from tests.trt.region_reference import as_text


def prepared(tmp_path, monkeypatch) -> Subject:
    """A small model whose regions all gain, by estimates."""
    monkeypatch.setattr(Roofline, "left", lambda self, piece: Measurement(1e4 * len(piece), 0.25, 0.125))
    monkeypatch.setattr(fusion_step, "_timer", lambda *_: Roofline())
    monkeypatch.setattr(region_nodes, "_compile", as_text)
    subject = Subject("window:1x128", str(tmp_path), 5)
    prepare_both(subject)
    return subject


def test_a_search_is_told_as_it_was_and_the_second_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))
    subject = prepared(tmp_path, monkeypatch)
    line = searched(subject, "", 60.0, 100.0, True)
    assert line["timer"].startswith("roofline") and line["complete"] and line["cached"] == 0
    assert line["samples"] > 5 and line["again_samples"] == 0
    assert line["builds"] > 0 and line["build_seconds"] == 0.125 * line["builds"]
    plan = read_plan(subject.plan)
    assert plan.cached == line["samples"], "the plan is the second run's"
    kept = [region for region in line["regions"] if region[5]]
    assert sum(region[7] for region in kept) == plan.kept > 0
    assert all(fused < left for _, _, _, fused, left, *_ in kept)
    assert {block[2] for block in line["blocks"]} == {1} and subject.portable.exists()
    assert initial_of(subject).portable.exists() and initial_of(subject).plan != subject.plan
    json.dumps(line)


def test_an_interrupted_search_leaves_the_best_so_far(tmp_path, monkeypatch):
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))
    subject = prepared(tmp_path, monkeypatch)

    def slow(self, region, config):
        time.sleep(0.5)
        return Measurement(5.0, 0.5)

    monkeypatch.setattr(Roofline, "fused", slow)
    line = searched(subject, "", 60.0, 1.5, False)
    assert not line["complete"] and line["search_s"] < 10 and "again_s" not in line
    assert subject.portable.exists()


def test_a_plan_of_another_run_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))
    subject, plans = prepared(tmp_path, monkeypatch), tmp_path / "plans"
    plans.mkdir()
    assert fusion_plans._known(subject, plans) is None and fusion_plans._known(subject, None) is None
    known = plans / f"{subject.name}.plan.json"
    known.write_bytes(initial_of(subject).plan.read_bytes())
    assert fusion_plans._known(subject, plans) == known
    assert not fusion_plans.applied(subject, known)
    functions = [{f.name for f in onnx.load(str(s.portable)).functions} for s in (subject, initial_of(subject))]
    assert functions[0] == functions[1] != set()


def test_three_engines_are_timed(arguments, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr("benchmarks.fusion_columns.find_plugin_library", lambda: tmp_path / "library.so")
    monkeypatch.setattr(fusion_plans, "load_plugins", lambda path: None)
    timing = Timing(1.5, 0, 0, True, 10)
    session = SimpleNamespace(time=lambda feeds, seconds: timing, close=lambda: None)
    monkeypatch.setattr(fusion_plans, "EngineSession", lambda data: session)
    subject = prepared(tmp_path, monkeypatch)
    searched(subject, "", 60.0, 100.0, False)
    initial = fusion_plans.build(initial_of(subject), True)
    found, attention = fusion_plans.build(subject, True), fusion_plans.build(subject, False)
    assert BUILDS == ["stof"] * 3
    MODELS[1, 128, 768] = Runner(onnx.load(str(subject.source)), tmp_path)  # what stands for engines
    line = fusion_plans.timed(subject, attention, initial, found, [subject.expected()])
    assert (line["attention_ms"], line["searched_ms"], line["initial_ms"]) == (2.0, 2.0, 1.5)
    assert line["burst_ms"] == [1.5, 1.5] and line["err_searched"] < 1e-5 and not line["problems"]
    json.dumps(line)
