"""Which constants are evaluated when a model is lowered."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from stof_onnx.graph.proto_graph import drop_dead
from stof_onnx.trt.fold_constants import fold_position_tables


def rotary(expand: bool, positions_are_input: bool) -> onnx.ModelProto:
    """x * cos(p f) + x * sin(p f), weights as 8-bit integers; the table of sines is repeated for the batch."""
    rng = np.random.default_rng(3)
    arrays = {
        "frequencies": rng.random((1, 4), np.float32),
        "axis": np.array([0], np.int64),
        "sizes": np.array([2, 6, 4], np.int64),
        "weight": rng.integers(-9, 9, (4, 4)).astype(np.int8),
        "step": np.array(0.25, np.float32),
    }
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 6, 4])]
    if positions_are_input:
        inputs.append(helper.make_tensor_value_info("positions", TensorProto.FLOAT, [6, 1]))
    else:
        arrays["positions"] = np.arange(6, dtype=np.float32)[:, None]
    nodes = [
        helper.make_node("DequantizeLinear", ["weight", "step"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Mul", ["positions", "frequencies"], ["angles"]),
        helper.make_node("Cos", ["angles"], ["cos"]),
        helper.make_node("Sin", ["angles"], ["sin"]),
        helper.make_node("Unsqueeze", ["sin", "axis"], ["sin3"]),
        helper.make_node("Expand" if expand else "Identity", ["sin3", "sizes"] if expand else ["sin3"], ["table"]),
        helper.make_node("Mul", ["y", "cos"], ["a"]),
        helper.make_node("Mul", ["y", "table"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["z"]),
    ]
    outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 6, 4])]
    stored = [numpy_helper.from_array(value, name) for name, value in arrays.items()]
    graph = helper.make_graph(nodes, "rotary", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


@pytest.mark.parametrize("expand", [False, True])
def test_waves_of_constant_positions_become_tables(rng, expand):
    model = rotary(expand, positions_are_input=False)
    feeds = {"x": rng.standard_normal((2, 6, 4), np.float32)}
    expected = ReferenceEvaluator(model).run(None, feeds)[0]
    assert fold_position_tables(model) == 2
    drop_dead(model.graph)
    kinds = Counter(node.op_type for node in model.graph.node)
    assert kinds == {"DequantizeLinear": 1, "MatMul": 1, "Mul": 2, "Add": 1} | ({"Expand": 1} if expand else {})
    np.testing.assert_allclose(ReferenceEvaluator(model).run(None, feeds)[0], expected, rtol=1e-6, atol=1e-6)
    assert fold_position_tables(model) == 0


def test_what_onnx_runtime_can_not_evaluate_stays():
    angles = helper.make_tensor("angles", TensorProto.BFLOAT16, [2], [0.5, 1.0])
    nodes = [helper.make_node("Cos", ["angles"], ["cos"]), helper.make_node("Mul", ["x", "cos"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [3, 2]) for name in "xy"]
    graph = helper.make_graph(nodes, "rotary", ends[:1], ends[1:], [angles])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    before = model.SerializeToString()
    assert fold_position_tables(model) == 0
    assert model.SerializeToString() == before


def test_positions_of_the_run_stay(rng):
    model = rotary(expand=False, positions_are_input=True)
    before = model.SerializeToString()
    assert fold_position_tables(model) == 0
    assert model.SerializeToString() == before
