"""The `Attention` node tests of the installed onnx package, as data."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

PREFIX = "test_attention_"


@dataclass(frozen=True)
class NodeTest:
    """One test: a model, and pairs of its inputs by name and the outputs they must give."""

    name: str
    model: onnx.ModelProto
    data_sets: tuple[tuple[dict[str, np.ndarray], list[np.ndarray]], ...]
    rtol: float
    atol: float


def attention_tests() -> list[NodeTest]:
    """Every `test_attention_*`, `_expanded` twins included, by name: the files that the package ships (onnx 1.19),
    or what its generator makes (later releases ship none)."""
    return sorted(_shipped() or _generated(), key=lambda test: test.name)


def _shipped() -> list[NodeTest]:
    cases = [c for c in load_model_tests(kind="node") if c.name.startswith(PREFIX) and c.model_dir]
    found = []
    for case in cases:
        folder = Path(case.model_dir)
        model = onnx.load(folder / "model.onnx")
        names = [value.name for value in model.graph.input]
        data = tuple(
            (dict(zip(names, _tensors(one, "input"), strict=True)), _tensors(one, "output"))
            for one in sorted(folder.glob("test_data_set_*"))
        )
        found.append(NodeTest(case.name, model, data, case.rtol, case.atol))
    return found


def _tensors(folder: Path, kind: str) -> list[np.ndarray]:
    files = sorted(folder.glob(f"{kind}_*.pb"), key=lambda f: int(f.stem.split("_")[1]))
    return [numpy_helper.to_array(onnx.load_tensor(f)) for f in files]


def _generated() -> list[NodeTest]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it makes the cases of every operator
        cases = [c for c in collect_testcases("Attention") if c.name.startswith(PREFIX)]
    found = []
    for case in cases:
        names = [value.name for value in case.model.graph.input]
        data = tuple((dict(zip(names, inputs, strict=True)), list(outputs)) for inputs, outputs in case.data_sets)
        found.append(NodeTest(case.name, case.model, data, case.rtol, case.atol))
    return found
