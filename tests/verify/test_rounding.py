"""float16 models are run with float16 rounding, as the hardware they are made for does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from stof_onnx.verify.session import Runner


def _absorbing(in_function: bool) -> onnx.ModelProto:
    """(x - 65504) + 65504, which is 0 in float16 for small x."""
    nodes = [helper.make_node("Add", ["x", "low"], ["t"]), helper.make_node("Sub", ["t", "low"], ["y"])]
    low = numpy_helper.from_array(np.array(-65504, np.float16), "low")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, [4]) for n in "xy"]
    opsets = [helper.make_opsetid("", 17)]
    if not in_function:
        return helper.make_model(
            helper.make_graph(nodes, "g", values[:1], values[1:], [low]), opset_imports=opsets, ir_version=8
        )
    function = helper.make_function("f", "Absorb", ["x", "low"], ["y"], nodes, opsets)
    call = helper.make_node("Absorb", ["x", "low"], ["y"], domain="f")
    graph = helper.make_graph([call], "g", values[:1], values[1:], [low])
    opsets = [*opsets, helper.make_opsetid("f", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)


def test_each_step_is_rounded() -> None:
    x = np.array([3, 1, -5, 7], np.float16)
    for in_function in (False, True):
        model = _absorbing(in_function)
        got = Runner(model, Path(), ["t"] * (not in_function)).run({"x": x})
        np.testing.assert_array_equal(got["y"], np.zeros(4, np.float16))
        np.testing.assert_array_equal(got["y"], ReferenceEvaluator(model).run(None, {"x": x})[0])
