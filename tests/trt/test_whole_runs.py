"""Runs of operators between plugins that have no normalization layer get one that changes nothing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from stof_onnx.trt.whole_runs import mark_runs

COLS = 8


def model(layer_norm: bool, opset: int = 17, dtype: type = np.float32) -> onnx.ModelProto:
    """RMSNorm, a plugin (here an Identity that is called one), RMSNorm twice, or LayerNormalization in place of one."""
    nodes: list[onnx.NodeProto] = []

    def rms(source: str, target: str) -> str:
        for kind, inputs, output, attributes in (
            ("Pow", [source, "two"], "square", {}),
            ("ReduceMean", [f"{target}/square"], "mean", {"axes": [-1], "keepdims": 1}),
            ("Add", [f"{target}/mean", "epsilon"], "sum", {}),
            ("Sqrt", [f"{target}/sum"], "root", {}),
            ("Div", ["one", f"{target}/root"], "factor", {}),
        ):
            nodes.append(helper.make_node(kind, inputs, [f"{target}/{output}"], **attributes))
        nodes.append(helper.make_node("Mul", [source, f"{target}/factor"], [target]))
        return target

    first = rms("x", "a")
    plugin = helper.make_node("StofAttention", [first], ["b"], domain="stof", plugin_version="1")
    nodes.append(plugin)
    if layer_norm:
        nodes.append(helper.make_node("LayerNormalization", ["b", "scale"], ["c"]))
    second = rms("c" if layer_norm else "b", "d")
    rms(second, "y")
    arrays = {"two": 2.0, "epsilon": 1e-6, "one": 1.0, "scale": np.ones(COLS)}
    stored = [numpy_helper.from_array(np.asarray(value, dtype), name) for name, value in arrays.items()]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ends = [helper.make_tensor_value_info(name, kind, ["rows", COLS]) for name in "xy"]
    graph = helper.make_graph(nodes, "runs", ends[:1], ends[1:], stored)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("stof", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    plain = onnx.ModelProto.FromString(proto.SerializeToString())
    for node in plain.graph.node:
        if node.op_type == "StofAttention":
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
    return ReferenceEvaluator(plain).run(None, {"x": x})[0]


@pytest.mark.parametrize("layer_norm", [False, True])
def test_one_a_run_and_none_beside_a_norm(rng, layer_norm):
    proto = model(layer_norm)
    x = np.concatenate([rng.standard_normal((5, COLS)), np.zeros((1, COLS)), np.full((1, COLS), 1e4)]).astype(
        np.float32
    )
    expected = run(proto, x)
    assert mark_runs(proto) == (1 if layer_norm else 2)
    marks = [
        n.input[0] for n in proto.graph.node if n.op_type == "LayerNormalization" and n.input[0].endswith("factor")
    ]
    assert marks == (["a/factor"] if layer_norm else ["a/factor", "d/factor"])
    onnx.checker.check_model(proto)
    np.testing.assert_array_equal(run(proto, x), expected)
    assert mark_runs(proto) == 0


def test_scale_and_shift_have_the_type_of_the_rows():
    proto = model(False, dtype=np.float16)
    expected = run(proto, np.ones((2, COLS), np.float16))
    assert mark_runs(proto) == 2
    for node in proto.graph.node:
        if node.op_type == "StofAttention":
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_array_equal(run(proto, np.ones((2, COLS), np.float16)), expected)


def test_a_mean_that_is_an_output_is_left_alone():
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", cols]) for name, cols in (("x", 8), ("y", 1))
    ]
    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=[-1], keepdims=1)
    graph = helper.make_graph([node], "mean", ends[:1], ends[1:])
    assert mark_runs(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)) == 0


def test_older_opsets_have_no_such_operator():
    assert mark_runs(model(False, opset=16)) == 0
