"""The `Attention` node tests that ship inside the onnx package, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests


@dataclass(frozen=True)
class NodeTest:
    """One shipped test: a model file, and data sets with inputs and the outputs they must give."""

    name: str
    folder: Path
    rtol: float
    atol: float

    @property
    def model_path(self) -> Path:
        return self.folder / "model.onnx"

    def data_sets(self) -> Iterator[tuple[dict[str, np.ndarray], list[np.ndarray]]]:
        """Inputs by name and outputs in order, for each data set."""
        graph = onnx.load(self.model_path).graph
        for data in sorted(self.folder.glob("test_data_set_*")):
            yield (
                dict(zip([i.name for i in graph.input], _tensors(data, "input"), strict=True)),
                _tensors(data, "output"),
            )


def _tensors(folder: Path, kind: str) -> list[np.ndarray]:
    files = sorted(folder.glob(f"{kind}_*.pb"), key=lambda f: int(f.stem.split("_")[1]))
    return [numpy_helper.to_array(onnx.load_tensor(f)) for f in files]


def attention_tests() -> list[NodeTest]:
    """Every `test_attention_*` of the installed onnx, `_expanded` twins included, by name."""
    found = [
        NodeTest(case.name, Path(case.model_dir), case.rtol, case.atol)
        for case in load_model_tests(kind="node")
        if case.name.startswith("test_attention_") and case.model_dir
    ]
    return sorted(found, key=lambda test: test.name)
