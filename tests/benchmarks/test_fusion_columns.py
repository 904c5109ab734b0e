"""benchmarks.fusion_columns, with TensorRT and the GPU stood in for as in test_end_to_end."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import onnx
from stof_onnx.fusion.plan import read_plan
from stof_onnx.trt import region_nodes
from stof_onnx.trt.session import Timing
from stof_onnx.verify.session import Runner

from benchmarks import fusion_columns
from benchmarks.fusion_columns import Sitting, Subject, prepare
from tests.benchmarks.test_end_to_end import BUILDS, MODELS, Here, arguments  # noqa: F401  (a fixture)
from tests.trt.region_reference import as_text

LOADED: list[Path] = []


def short_session(data: bytes) -> SimpleNamespace:
    """An engine of another process is of no use without its library."""
    assert LOADED
    timing = Timing(1.5, 0, 0, True, 10)
    return SimpleNamespace(time=lambda feeds, seconds, use_graph=True: timing, close=lambda: None)


def sitting(monkeypatch, library, seconds=1e6):
    monkeypatch.setattr(region_nodes, "_compile", as_text)
    monkeypatch.setattr(fusion_columns, "find_plugin_library", lambda: library)
    monkeypatch.setattr(fusion_columns, "load_plugins", LOADED.append)
    monkeypatch.setattr(fusion_columns, "EngineSession", short_session)
    monkeypatch.setattr(fusion_columns, "_PAUSE_S", 0.0)
    LOADED.clear()
    return Sitting(Here(), Here(), time.monotonic() + seconds)


def test_two_lines_a_subject(arguments, monkeypatch, tmp_path):  # noqa: F811
    found = sitting(monkeypatch, tmp_path / "library.so")
    subjects = [Subject(text, str(tmp_path), 5) for text in ("causal:2x128", "window:1x192")]
    found.ahead(subjects)
    found.order(subjects, subjects[:1])
    assert sorted(BUILDS) == ["plain", "stof", "stof", "stof", "stof"]
    lines = list(found.lines(subjects[:1]))
    assert [(line["mask"], line["B"], line["S"], line["fusion"]) for line in lines] == [
        ("causal", 2, 128, False),
        ("causal", 2, 128, True),
    ]
    assert (lines[1]["plain_ms"], lines[1]["attention_ms"], lines[1]["stof_ms"]) == (3.0, 2.0, 2.0)
    assert lines[1]["half_io"] and lines[1]["err_stof"] < 1e-5 and lines[1]["layers_us"] == {"a layer": 5.0}
    assert [template for template, _, _ in lines[1]["regions"]].count("gemm_epilogue") == 8, "no GEMM is left"
    assert [line["burst_ms"] for line in lines] == [1.5, 1.5] and [tmp_path / "library.so"] == LOADED
    json.dumps(lines)


def test_a_build_that_does_not_end_is_ended(arguments, monkeypatch, tmp_path):  # noqa: F811
    found, ended = sitting(monkeypatch, tmp_path / "library.so", seconds=0.0), []
    subject = Subject("causal:1x64", str(tmp_path), 5)
    found.ahead([subject])
    found.order([subject], [subject])
    endless: Future = Future()
    endless.set_running_or_notify_cancel()
    found.engines[subject, "plain"] = endless
    monkeypatch.setattr("multiprocessing.active_children", lambda: [SimpleNamespace(kill=lambda: ended.append("it"))])
    lines = list(found.lines([subject]))
    assert ended == ["it"]
    assert [(line["fusion"], line["plain_ms"], line["stof_ms"]) for line in lines] == [
        (False, None, 2.0),
        (True, None, 2.0),
    ]


def test_regions_alone_have_their_line(arguments, monkeypatch, tmp_path):  # noqa: F811
    found = sitting(monkeypatch, tmp_path / "library.so", seconds=0.0)
    subject = Subject("causal:1x64", str(tmp_path), 5)
    found.ahead([subject])
    found.order([subject], [])
    endless: Future = Future()
    found.engines[subject, "stof"] = endless
    MODELS[1, 64, 768] = Runner(onnx.load(str(subject.source)), tmp_path)  # what stands for engines
    (line,) = found.lines([subject])
    assert endless.cancelled()
    assert (line["fusion"], line["attention_ms"], line["stof_ms"], line["kept"]) == (True, None, 2.0, "fused")
    assert line["gain"] is None and line["err_stof"] < 1e-5 and line["mask_bytes"] > 0


def test_a_subject_that_fails_leaves_the_others(arguments, monkeypatch, tmp_path, capsys):  # noqa: F811
    found = sitting(monkeypatch, tmp_path / "library.so")
    subjects = [Subject(text, str(tmp_path), 5) for text in ("spiral:1x64", "causal:1x64")]
    found.ahead(subjects)
    found.order(subjects, subjects)
    assert [line["fusion"] for line in found.lines(subjects)] == [False, True]
    assert "encoder-spiral-1x64 FAILED" in capsys.readouterr().out


def test_the_plan_takes_every_usual_subgraph(tmp_path):
    subject = Subject("window:1x128", str(tmp_path), 5)
    said = prepare(subject)
    assert said.startswith("2 attentions, 12 regions")
    plan = read_plan(subject.plan)
    assert plan.kept == 12 and plan.timer.startswith("initial scheme")
