"""Small models with everything that a graph library likes to lose."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def linear(opset: int = 17, width: int = 8, ir_version: int = 8) -> onnx.ModelProto:
    """y = relu(x @ w) + b with x [batch, width]."""
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["xw"], name="project"),
            helper.make_node("Relu", ["xw"], ["r"], name="relu"),
            helper.make_node("Add", ["r", "b"], ["y"], name="bias"),
        ],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", width])],
        [
            numpy_helper.from_array(rng.standard_normal((width, width)).astype(np.float32), "w"),
            numpy_helper.from_array(rng.standard_normal(width).astype(np.float32), "b"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def decorated() -> onnx.ModelProto:
    """`linear` with metadata, doc strings, annotations, overloads, and attributes of rare types."""
    model = linear(opset=21, ir_version=10)
    model.producer_name, model.producer_version, model.domain = "maker", "1.2", "org.example"
    model.model_version, model.doc_string = 7, "model doc"
    helper.set_model_props(model, {"license": "none", "task": "test"})
    graph = model.graph
    graph.doc_string = "graph doc"
    graph.metadata_props.add(key="graph", value="kept")
    graph.node[0].doc_string = "node doc"
    graph.node[0].metadata_props.add(key="namespace", value="layer.0")
    graph.input[0].doc_string = "input doc"
    graph.initializer[0].doc_string = "weight doc"
    annotation = graph.quantization_annotation.add(tensor_name="w")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="b")
    graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, ["batch", 8]))
    graph.value_info[0].doc_string = "value doc"
    for overload in ("a", "b"):
        function = helper.make_function(
            "local",
            "Twice",
            ["a"],
            ["c"],
            [helper.make_node("Add", ["a", "a"], ["c"], name=f"add_{overload}")],
            [helper.make_opsetid("", 21)],
        )
        function.overload, function.doc_string = overload, f"function {overload}"
        model.functions.append(function)
        graph.node.append(
            helper.make_node("Twice", ["y"], [f"y_{overload}"], domain="local", overload=overload, name=f"t{overload}")
        )
        graph.output.append(helper.make_tensor_value_info(f"y_{overload}", TensorProto.FLOAT, ["batch", 8]))
    model.opset_import.append(helper.make_opsetid("local", 1))
    optional = helper.make_node("Optional", [], ["nothing"], name="optional")
    optional.attribute.append(
        helper.make_attribute("type", helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))  # a TYPE_PROTO
    )
    graph.node.append(optional)
    blob = helper.make_node("Plugin", ["y"], ["p"], domain="org.example", name="plugin", data=b"\xff\xfe\x00", size=3)
    graph.node.append(blob)
    model.opset_import.append(helper.make_opsetid("org.example", 2))
    graph.output.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, None))
    unused = numpy_helper.from_array(np.arange(3, dtype=np.int64), "unused")
    graph.initializer.append(unused)
    return model


def branching() -> onnx.ModelProto:
    """An If whose branches read an outer weight; one branch has an initializer of its own."""
    out = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    inner = numpy_helper.from_array(np.full(8, 2, np.float32), "inner")
    then = helper.make_graph([helper.make_node("Mul", ["y", "b"], ["z"], name="outer_weight")], "then", [], out)
    out = [helper.make_tensor_value_info("z2", TensorProto.FLOAT, None)]
    other = helper.make_graph([helper.make_node("Mul", ["y", "inner"], ["z2"])], "else", [], out, [inner])
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    model.graph.node.append(helper.make_node("If", ["flag"], ["out"], then_branch=then, else_branch=other, name="if"))
    model.graph.output.append(helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", 8]))
    return model


def save_external(model: onnx.ModelProto, path: Path, location: str = "weights.bin") -> None:
    """Writes `model` with every initializer in one external file."""
    if (path.parent / location).exists():
        os.unlink(path.parent / location)
    onnx.save_model(model, str(path), save_as_external_data=True, location=location, size_threshold=0)
