"""Shape arithmetic between a GEMM and the sum behind it does not part them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from stof_onnx.fusion.fixed_shapes import fold_fixed_shapes


def model(batch: int | str) -> onnx.ModelProto:
    """Reshape(Gemm(Reshape(x))) + x, as GPT-2's exports have it: the sizes are taken from x."""
    info = helper.make_tensor_value_info
    weight = np.random.default_rng(3).standard_normal((8, 8), np.float32)
    constants = {
        "w": weight,
        "rows": np.array([-1, 8]),
        "front": np.array([0]),
        "end": np.array([2]),
        "n": np.array([8]),
    }
    nodes = [
        helper.make_node("Reshape", ["x", "rows"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w"], ["product"]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "front", "end"], ["leading"]),
        helper.make_node("Concat", ["leading", "n"], ["sizes"], axis=0),
        helper.make_node("Reshape", ["product", "sizes"], ["y3"]),
        helper.make_node("Add", ["y3", "x"], ["y"]),
    ]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    x, y = (info(name, TensorProto.FLOAT, [batch, 4, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], stored, value_info=[info("sizes", TensorProto.INT64, [3])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def parted(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The initializers, taken out of the model."""
    found = [onnx.TensorProto.FromString(t.SerializeToString()) for t in proto.graph.initializer]
    del proto.graph.initializer[:]
    return found


def test_fixed_sizes_are_folded():
    proto = model(2)
    x = {"x": np.random.default_rng(4).standard_normal((2, 4, 8), np.float32)}
    (before,) = ReferenceEvaluator(proto).run(None, x)
    stored = parted(proto)
    assert fold_fixed_shapes(proto, stored) == 3
    assert [node.op_type for node in proto.graph.node] == ["Reshape", "Gemm", "Reshape", "Add"]
    assert not proto.graph.initializer and not proto.graph.value_info
    proto.graph.initializer.extend(stored)
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_array_equal(ReferenceEvaluator(proto).run(None, x)[0], before)


def test_sizes_of_the_run_stay():
    proto = model("batch")
    stored = parted(proto)
    assert fold_fixed_shapes(proto, stored) == 0
    assert len(proto.graph.node) == 7 and len(stored) == 5


def test_what_nothing_reads_goes():
    proto = model("batch")
    for nodes in (("Relu", "flat", "unread1"), ("Neg", "unread1", "unread2")):
        proto.graph.node.append(helper.make_node(nodes[0], [nodes[1]], [nodes[2]]))
    proto.graph.value_info.append(helper.make_tensor_value_info("unread1", TensorProto.FLOAT, [None, 8]))
    stored = parted(proto)
    assert fold_fixed_shapes(proto, stored) == 2
    assert not {"Relu", "Neg"} & {node.op_type for node in proto.graph.node}
    assert [v.name for v in proto.graph.value_info] == ["sizes"]
