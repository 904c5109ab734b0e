"""The index over a graph's protobuf."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.graph.proto_graph import ProtoGraph


def test_fresh_names_are_not_those_of_tensors_in_subgraphs():
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    stored = numpy_helper.from_array(np.ones(2, np.float32), "x_2d")
    branches = [
        helper.make_graph([helper.make_node("Add", ["x", name], [f"{name}_1"])], "b", [], [info], [stored])
        for name in ("x_2d", "x_rows")
    ]
    node = helper.make_node("If", ["x"], ["y"], then_branch=branches[0], else_branch=branches[1])
    graph = ProtoGraph(helper.make_graph([node], "g", [info], [info]))
    assert [graph.fresh(name) for name in ("x", "x_2d", "x_2d", "z")] == ["x_1", "x_2d_2", "x_2d_3", "z"]
