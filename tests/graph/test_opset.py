"""Old models are converted and still compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from stof_onnx.errors import StofError
from stof_onnx.graph.model import load_model
from stof_onnx.graph.save import save_model
from stof_onnx.graph.softmax import rejoin_softmax

from tests.graph.builders import linear, save_external


def _old() -> onnx.ModelProto:
    model = linear(opset=11, ir_version=3)
    graph = model.graph
    graph.node[0].doc_string = "kept"
    graph.node.append(helper.make_node("Softmax", ["y"], ["p"], axis=1))
    graph.node.append(helper.make_node("Unsqueeze", ["p"], ["u"], axes=[0]))
    graph.output[0].CopyFrom(helper.make_tensor_value_info("u", TensorProto.FLOAT, [1, "batch", 8]))
    graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer)
    helper.set_model_props(model, {"license": "none"})
    model.doc_string = "doc"
    return model


@pytest.mark.parametrize("external", [False, True])
def test_conversion(external: bool, tmp_path: Path) -> None:
    model = _old()
    if external:
        save_external(model, tmp_path / "in.onnx")
    else:
        onnx.save(model, str(tmp_path / "in.onnx"))
    loaded = load_model(tmp_path / "in.onnx")
    assert (loaded.source_opset, loaded.opset) == (11, 17)
    assert loaded.notes == ["converted from opset 11 to 17"]
    save_model(loaded, tmp_path / "out.onnx")
    saved = onnx.load(str(tmp_path / "out.onnx"))
    assert [i.name for i in saved.graph.input] == ["x"] and saved.graph.output == model.graph.output
    assert saved.doc_string == "doc" and saved.metadata_props == model.metadata_props
    assert saved.graph.node[0].doc_string == "kept"
    x = np.random.default_rng(3).standard_normal((5, 8)).astype(np.float32)
    got, want = (ort.InferenceSession(str(tmp_path / n)).run(None, {"x": x})[0] for n in ("out.onnx", "in.onnx"))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_functions_are_inlined_before_conversion(tmp_path: Path) -> None:
    model = linear(opset=15, ir_version=8)
    model.functions.append(
        helper.make_function(
            "local", "Twice", ["a"], ["c"], [helper.make_node("Add", ["a", "a"], ["c"])], [helper.make_opsetid("", 15)]
        )
    )
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.graph.node[1].op_type, model.graph.node[1].domain = "Twice", "local"
    onnx.save(model, str(tmp_path / "in.onnx"))
    save_model(load_model(tmp_path / "in.onnx"), tmp_path / "out.onnx")
    x = np.random.default_rng(3).standard_normal((5, 8)).astype(np.float32)
    got, want = (ort.InferenceSession(str(tmp_path / n)).run(None, {"x": x})[0] for n in ("out.onnx", "in.onnx"))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_what_can_not_be_converted_is_refused(tmp_path: Path) -> None:
    model = linear(opset=8, ir_version=3)
    graph = model.graph
    graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer)
    graph.node.append(helper.make_node("BatchNormalization", ["y", "b", "b", "b", "b"], ["n"], spatial=0))
    graph.output[0].CopyFrom(helper.make_tensor_value_info("n", TensorProto.FLOAT, ["batch", 8]))
    onnx.save(model, str(tmp_path / "in.onnx"))
    with pytest.raises(StofError, match=r"opset 8 can not be converted to 17 \(.*spatial"):
        load_model(tmp_path / "in.onnx")


@pytest.mark.parametrize(("axis", "rejoined"), [(2, True), (1, False)])
def test_softmax_is_rejoined_only_on_the_last_axis(axis: int, rejoined: bool, tmp_path: Path) -> None:
    """The rank of a Reshape by a computed shape is unknown to the converter, so it takes Softmax apart."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Slice", ["s"], ["head"], starts=[0], ends=[1]),
        helper.make_node("Concat", ["head", "middle", "tail"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["r"]),
        helper.make_node("Softmax", ["r"], ["y"], axis=axis),
    ]
    tail = onnx.numpy_helper.from_array(np.array([1], np.int64), "tail")
    middle = onnx.numpy_helper.from_array(np.array([-1], np.int64), "middle")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [tail, middle],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)
    onnx.save(model, str(tmp_path / "in.onnx"))
    loaded = load_model(tmp_path / "in.onnx")
    assert "Flatten" in {n.op for n in loaded.graph.nodes}
    rejoin_softmax(loaded)
    assert ("Flatten" in {n.op for n in loaded.graph.nodes}) is not rejoined
    save_model(loaded, tmp_path / "out.onnx")
    x = np.random.default_rng(3).standard_normal((5, 6)).astype(np.float32)
    got, want = (ort.InferenceSession(str(tmp_path / n)).run(None, {"x": x})[0] for n in ("out.onnx", "in.onnx"))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
