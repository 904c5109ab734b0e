"""Shape arithmetic that ONNX's inference leaves open, as torch writes `expand` with -1 for sizes that stay."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.graph.proto_shapes import infer_shapes


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
