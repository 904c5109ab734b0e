"""Shape arithmetic that ONNX's inference leaves open, as torch writes `expand` with -1 for sizes that stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.graph.model import load_model
from stof_onnx.graph.proto_shapes import infer_shapes
from stof_onnx.graph.shapes import Scenario, Shapes


def expanded(batch: int | str) -> onnx.ModelProto:
    """y = x expanded to [-1 -> its batch, 8] through Shape, ConstantOfShape, Mul, Equal, Where."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], start=0, end=1),
        helper.make_node("Concat", ["shape", "eight"], ["wanted"], axis=0),
        helper.make_node("Shape", ["wanted"], ["rank"]),
        helper.make_node("ConstantOfShape", ["rank"], ["ones"], value=numpy_helper.from_array(np.ones(1, np.int64))),
        helper.make_node("Mul", ["ones", "minus"], ["minuses"]),
        helper.make_node("Equal", ["wanted", "minuses"], ["open"]),
        helper.make_node("Where", ["open", "ones", "wanted"], ["sizes"]),
        helper.make_node("Expand", ["x", "sizes"], ["y"]),
        helper.make_node("RandomNormalLike", ["y"], ["noise"]),
        helper.make_node("Add", ["y", "noise"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 1])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.array([8], np.int64), "eight"),
            numpy_helper.from_array(np.array(-1, np.int64), "minus"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_fixed_sizes_are_found_through_it():
    model = expanded(1)
    before = model.SerializeToString()
    inferred = infer_shapes(model)
    assert inferred.dims["y"] == inferred.dims["z"] == (1, 8)
    assert inferred.types["sizes"] == TensorProto.INT64
    assert model.SerializeToString() == before


def test_dynamic_sizes_stay_unknown_until_they_are_given():
    dims = infer_shapes(expanded("batch")).dims["y"]
    assert not isinstance(dims[0], int)
    assert infer_shapes(expanded("batch"), {"x": (3, 1)}).dims["y"] == (3, 8)


def test_a_size_that_a_caller_may_override_is_not_known():
    model = expanded(2)
    model.graph.input.append(helper.make_tensor_value_info("eight", TensorProto.INT64, [1]))
    batch, width = infer_shapes(model).dims["y"]
    assert batch == 2 and not isinstance(width, int)


def test_a_logarithm_of_zero_is_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """-inf of a branch that a Where discards, as T5's exports have it."""
    zeros = numpy_helper.from_array(np.zeros(2, np.float32), "zeros")
    nodes = [helper.make_node("Log", ["zeros"], ["y"]), helper.make_node("Cast", ["y"], ["z"], to=TensorProto.INT64)]
    outputs = [helper.make_tensor_value_info("z", TensorProto.INT64, [2])]
    graph = helper.make_graph(nodes, "g", [], outputs, [zeros])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    model = load_model(path)
    (log,) = (node for node in model.graph.nodes if node.op == "Log")
    assert np.array_equal(Shapes(model, Scenario({}, {})).value(log.outputs[0]), [-np.inf] * 2)
    assert not [w for w in recwarn if w.category is RuntimeWarning]
