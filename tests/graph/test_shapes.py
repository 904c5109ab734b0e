"""Shapes of what ONNX's own inference does not know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from stof_onnx.graph.model import load_model
from stof_onnx.graph.shapes import Scenario, Shapes


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize(("batch_a", "batch_b"), [((), ()), ((2, 3), (2, 3)), ((3,), (2, 1)), ((), (4,))])
def test_a_fused_product_has_the_shape_that_onnx_runtime_gives_it(
    trans_a: int, trans_b: int, batch_a: tuple[int, ...], batch_b: tuple[int, ...], tmp_path: Path
) -> None:
    a = (*batch_a, *((5, 7) if trans_a else (7, 5)))
    b = (*batch_b, *((11, 5) if trans_b else (5, 11)))
    attributes = {"transA": trans_a, "transB": trans_b, "alpha": 0.5}
    shapes = _shapes(a, b, attributes, tmp_path)
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"a": np.zeros(a, np.float32), "b": np.zeros(b, np.float32)})
    assert shapes == out.shape


@pytest.mark.parametrize(
    ("a", "b", "attributes"),
    [
        ((2, 4, 3, 5), (2, 4, 5, 6), {"transBatchA": 1}),
        ((2, 3, 4), (2, 5, 6), {}),
        ((4,), (4, 6), {}),
    ],
)
def test_other_fused_products_have_an_unknown_shape(
    a: tuple[int, ...], b: tuple[int, ...], attributes: dict[str, int], tmp_path: Path
) -> None:
    assert _shapes(a, b, attributes, tmp_path) is None


def _shapes(
    a: tuple[int, ...], b: tuple[int, ...], attributes: dict[str, float], folder: Path
) -> tuple[int, ...] | None:
    product = helper.make_node("FusedMatMul", ["a", "b"], ["y"], domain="com.microsoft", **attributes)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("a", a), ("b", b))]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    graph = helper.make_graph([product, helper.make_node("Identity", ["y"], ["z"])], "g", inputs, [output])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(folder / "m.onnx"))
    model = load_model(folder / "m.onnx")
    return Shapes(model, Scenario({"a": a, "b": b}, {})).shape(model.graph.outputs[0])
