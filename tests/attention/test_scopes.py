"""Sites inside If, Loop and Scan bodies and in model-local functions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from stof_onnx.attention.types import KvKind
from stof_onnx.graph.model import load_model
from stof_onnx.mask import decode
from stof_onnx.options import OptimizeOptions

from tests.attention.graphs import Graph, Sizes, attention
from tests.attention.reference import find

CAUSAL = np.tril(np.ones((9, 9), bool))


def causal(g: Graph, x: str) -> str:
    return g.add("Where", g.const(CAUSAL), x, g.const(-1e9))


def body_of(g: Graph, name: str, inputs: list[str], outputs: list[str]) -> onnx.GraphProto:
    """The graph of `g` as a body: its inputs are named there or captured."""
    own = [i for i in g.inputs if i.name in inputs]
    return helper.make_graph(
        g.nodes, name, own, [helper.make_empty_tensor_value_info(o) for o in outputs], g.initializers
    )


def test_branch_of_if(tmp_path):
    inner = Graph(prefix="in_")
    out = attention(inner, terms=causal)
    other = Graph(prefix="else_")
    copy = other.add("Identity", "q")
    outer = Graph()
    outer.inputs = list(inner.inputs)
    condition = outer.input("flag", [1], np.bool_)
    y = outer.add("If", condition)
    outer.nodes[-1].attribute.extend(
        [
            helper.make_attribute("then_branch", body_of(inner, "then", [], [out])),
            helper.make_attribute("else_branch", body_of(other, "else", [], [copy])),
        ]
    )
    outer.output(y)
    match = find(outer.model(), tmp_path).only
    assert match.q.name == "q" and match.graph.name == "then"
    assert match.mask is not None
    np.testing.assert_array_equal(np.squeeze(decode(match.mask)), CAUSAL)


def loop_model(mask_from_loop: bool) -> onnx.ModelProto:
    """Three rounds of x = attention(x, k, v); the mask is captured, or depends on the round."""
    inner = Graph(prefix="in_")

    def terms(g: Graph, x: str) -> str:
        if not mask_from_loop:
            return g.add("Add", x, "outer_mask")
        seen = g.add("LessOrEqual", "cols", g.add("Add", "rows", "round"))
        return g.add("Where", seen, x, g.const(-1e9))

    out = attention(inner, terms=terms)
    state = inner.inputs[0]
    keep = inner.add("Identity", "go")
    body = helper.make_graph(
        inner.nodes,
        "body",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            state,
        ],
        [helper.make_empty_tensor_value_info(keep), helper.make_empty_tensor_value_info(out)],
        inner.initializers,
    )
    outer = Graph()
    x = outer.input("x", [2, 9, 32])
    outer.inputs += inner.inputs[1:]
    steps = outer.add("Range", outer.const(0, np.int64), outer.const(9, np.int64), outer.const(1, np.int64))
    rows = outer.add("Unsqueeze", steps, outer.ints(1))
    cols = outer.add("Unsqueeze", steps, outer.ints(0))
    seen = outer.add("LessOrEqual", cols, rows)
    outer.nodes.append(helper.make_node("Identity", [rows], ["rows"]))
    outer.nodes.append(helper.make_node("Identity", [cols], ["cols"]))
    outer.nodes.append(
        helper.make_node("Where", [seen, outer.const(0.0), outer.const(-np.inf)], ["outer_mask"], name="outer_where")
    )
    y = outer.add("Loop", outer.const(3, np.int64), outer.const(True), x)
    outer.nodes[-1].attribute.append(helper.make_attribute("body", body))
    outer.output(y)
    return outer.model()


def test_body_of_loop_with_a_mask_from_outside(tmp_path):
    match = find(loop_model(False), tmp_path).only
    assert match.graph.name == "body" and match.mask is not None
    np.testing.assert_array_equal(np.squeeze(decode(match.mask)), CAUSAL)


def test_mask_that_depends_on_the_round_is_refused(tmp_path):
    assert find(loop_model(True), tmp_path).refused.reason


def test_body_of_scan(tmp_path):
    """Attention on each element of a scanned axis, K and V captured."""
    inner = Graph(prefix="in_")
    out = attention(inner, terms=causal)
    body = helper.make_graph(
        inner.nodes,
        "scan_body",
        [inner.inputs[0]],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, [2, 9, 32])],
        inner.initializers,
    )
    outer = Graph()
    x = outer.input("xs", [5, 2, 9, 32])
    outer.inputs += inner.inputs[1:]
    y = outer.add("Scan", x, num_scan_inputs=1)
    outer.nodes[-1].attribute.append(helper.make_attribute("body", body))
    outer.output(y)
    match = find(outer.model(), tmp_path).only
    assert (match.q.name, match.k.name) == ("q", "k") and match.graph.name == "scan_body"


def function_model(calls: int, lengths: tuple[int, ...] = (9, 9)) -> onnx.ModelProto:
    """A local function holds the attention; its mask and padding come from the caller."""
    inner = Graph(prefix="in_")

    def terms(g: Graph, x: str) -> str:
        hidden = g.add("Unsqueeze", g.add("Cast", "pad", to=9), g.nodes[0].output[0])
        return g.add("Where", g.add("And", "seen", hidden), x, g.nodes[1].output[0])

    axes = helper.make_tensor("axes", TensorProto.INT64, [2], [1, 2])
    fill = helper.make_tensor("fill", TensorProto.FLOAT, [], [-1e9])
    inner.nodes.append(helper.make_node("Constant", [], ["in_axes"], value=axes))
    inner.nodes.append(helper.make_node("Constant", [], ["in_fill"], value=fill))
    out = attention(inner, Sizes(), terms)
    # A function has no initializers: its constants are nodes.
    constants = [
        helper.make_node("Constant", [], [i.name], value=i, name=f"const_{i.name}") for i in inner.initializers
    ]
    function = helper.make_function(
        "local", "Attend", ["q", "k", "v", "pad", "seen"], [out], constants + inner.nodes, [helper.make_opsetid("", 18)]
    )
    g = Graph(functions=[function])
    for i in range(calls):
        n = lengths[i]
        q, k, v = (g.input(f"{x}{i}", [2, n, 32]) for x in "qkv")
        pad = g.input(f"pad{i}", [2, n], np.int64)
        out = g.add("Attend", q, k, v, pad, g.const(np.tril(np.ones((n, n), bool))), domain="local")
        g.outputs.append(helper.make_tensor_value_info(out, TensorProto.FLOAT, [2, n, 32]))
    graph = helper.make_graph(g.nodes, "main", g.inputs, g.outputs, g.initializers)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=9)


def test_function_called_once(tmp_path):
    match = find(function_model(1), tmp_path).only
    assert match.q.name == "q" and match.kv_mask.kind is KvKind.MASK
    assert match.kv_mask.tensor is not None and match.kv_mask.tensor.name == "pad"
    assert match.mask is not None
    np.testing.assert_array_equal(np.squeeze(decode(match.mask)), CAUSAL)


def test_function_called_at_different_lengths_is_refused(tmp_path):
    assert find(function_model(2, (9, 7)), tmp_path).refused.reason


@pytest.mark.parametrize("domain", ["stof"])
def test_what_an_earlier_run_wrote_is_left_alone(domain, tmp_path):
    model = function_model(1)
    model.functions[0].domain = domain
    model.opset_import[1].domain = domain
    for node in model.graph.node:
        if node.op_type == "Attend":
            node.domain = domain
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    from stof_onnx.attention.match import find_attention

    assert find_attention(load_model(path), OptimizeOptions()) == ([], [])
