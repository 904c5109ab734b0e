"""benchmarks.fusion_columns, with TensorRT and the GPU stood in for as in test_end_to_end."""

from __future__ import annotations

import json
import time

from stof_onnx.fusion.plan import read_plan
from stof_onnx.trt import region_nodes

from benchmarks import fusion_columns
from benchmarks.fusion_columns import Sitting, Subject, prepare
from tests.benchmarks.test_end_to_end import BUILDS, Here, arguments  # noqa: F401  (a fixture)
from tests.trt.region_reference import as_text


def sitting(monkeypatch, library, seconds=1e6):
    monkeypatch.setattr(region_nodes, "_compile", as_text)
    monkeypatch.setattr(fusion_columns, "find_plugin_library", lambda: library)
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
    json.dumps(lines)


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
