"""Manifests of engines that someone has edited: what they say is checked, nothing of it is believed blindly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from stof_onnx.errors import StofError
from stof_onnx.options import OptimizeOptions
from stof_onnx.trt import engine_step
from stof_onnx.trt.manifest import check_gpu, digest, manifest_of, plugin_library_of, precision_of, read_manifest

ERROR = {"max_abs": 0.1, "relative": 0.4, "nonfinite": 0}


class Session:
    """In place of an engine: it doubles, and is off by a part of that."""

    def opt_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (2, 4)}

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": 2.5 * feeds["x"]}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "m.engine"
    path.write_bytes(b"an engine")
    return path


def write(engine: Path, values: Any) -> None:
    manifest_of(engine).write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "[" * 100_000, '{"sha256": "0"}', "\udcff"])
def test_what_is_no_manifest_of_the_engine_says_nothing(engine: Path, text: str) -> None:
    manifest_of(engine).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_manifest(engine) == {}
    assert plugin_library_of(engine) is None
    check_gpu(engine, 90)


@pytest.mark.parametrize("value", [None, 3, [], {}, "", "int8", "fp8"])
def test_a_precision_that_there_is_not(engine: Path, value: Any) -> None:
    assert precision_of({"precision": value}) == "fp16"
    assert precision_of({"precision": "bf16"}) == "bf16"


@pytest.mark.parametrize(
    "measured",
    [3, [], "x", {"plain": 3}, {"plain": {"error": []}}, {"plain": {"error": {"relative": 9.0}}},
     {"plain": {"error": ERROR | {"relative": "9"}}}, {"plain": {"error": ERROR | {"relative": None}}},
     {"plain": {"error": ERROR | {"more": 1}}}],
)  # fmt: skip
def test_an_error_of_the_plain_engine_that_is_none_excuses_nothing(
    engine: Path, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [x], [y])
    model = engine.with_name("m.onnx")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(model))
    monkeypatch.setattr(engine_step, "load_engine", lambda path: Session())
    write(engine, {"sha256": digest(engine), "measured": measured})
    assert not engine_step.verify_engine(model, engine, OptimizeOptions()).passed
    write(engine, {"sha256": digest(engine), "measured": {"plain": {"error": ERROR}}})
    assert engine_step.verify_engine(model, engine, OptimizeOptions()).passed, "the rule: twice the plain engine's"


def test_a_library_that_is_another_one_is_refused(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOF_PLUGIN_LIBRARY", raising=False)
    library = engine.with_name("library.so")
    library.write_bytes(b"a library")
    plugins = {"path": str(library), "sha256": digest(library), "embedded": False}
    write(engine, {"plugin_library": plugins})
    assert plugin_library_of(engine) == library
    for change, message in (
        ({"sha256": ""}, "not the one"),
        ({"path": "no.so"}, "missing"),
        ({"path": None}, "missing"),
    ):
        write(engine, {"plugin_library": plugins | change})
        with pytest.raises(StofError, match=message):
            plugin_library_of(engine)


def test_an_engine_of_another_gpu_is_refused(engine: Path) -> None:
    for value in (None, "90", [90], 9.0):
        write(engine, {"arch": value})
        check_gpu(engine, 90)
    write(engine, {"arch": 80, "gpu": "A100"})
    with pytest.raises(StofError, match="A100"):
        check_gpu(engine, 90)
