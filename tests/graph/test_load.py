"""Bad files get one clear message; what can be repaired is repaired, and noted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.errors import StofError
from stof_onnx.graph.inputs import apply_shapes
from stof_onnx.graph.model import LoadedModel, load_model
from stof_onnx.graph.save import check_target, save_model
from stof_onnx.options import DimRange, parse_shapes

from tests.graph.builders import branching, linear, save_external


def _load(model: onnx.ModelProto, folder: Path) -> LoadedModel:
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return load_model(folder / "m.onnx")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"# not a model\n" * 50, "not a readable ONNX model|not an ONNX model"),
        (linear().SerializeToString()[:200], "not a readable ONNX model"),
        (onnx.ModelProto(ir_version=8).SerializeToString(), "no graph"),
    ],
)
def test_files_that_are_no_models(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(StofError, match=message):
        load_model(tmp_path / "m.onnx")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """Cutting a model anywhere gives a StofError, or (at field bounds) a model that the checker accepts."""
    data = linear().SerializeToString()
    for length in range(0, len(data), 7):
        (tmp_path / "m.onnx").write_bytes(data[:length])
        with pytest.raises(StofError):
            load_model(tmp_path / "m.onnx")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StofError, match="no such file"):
        load_model(tmp_path / "none.onnx")
    with pytest.raises(StofError, match="is a folder"):
        load_model(tmp_path)


def test_external_data_problems(tmp_path: Path) -> None:
    save_external(linear(), tmp_path / "m.onnx")
    data = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(data[:-1])
    with pytest.raises(StofError, match="do not hold the"):
        load_model(tmp_path / "m.onnx")
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(StofError, match="missing"):
        load_model(tmp_path / "m.onnx")
    for location in ("../weights.bin", "/etc/passwd", "a/../../weights.bin"):
        proto = onnx.load(str(tmp_path / "m.onnx"), load_external_data=False)
        for tensor in proto.graph.initializer:
            next(e for e in tensor.external_data if e.key == "location").value = location
        (tmp_path / "m2.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(StofError, match="leaves the model's folder"):
            load_model(tmp_path / "m2.onnx")


def test_external_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save_external(linear(), tmp_path / "a" / "m.onnx")
    (tmp_path / "a" / "weights.bin").rename(tmp_path / "weights.bin")
    (tmp_path / "a" / "weights.bin").symlink_to(tmp_path / "weights.bin")
    with pytest.raises(StofError, match="leaves the model's folder"):
        load_model(tmp_path / "a" / "m.onnx")


@pytest.mark.parametrize("field", ["name", "doc_string", "input"])
def test_names_that_are_no_text(tmp_path: Path, field: str) -> None:
    model = linear()
    for node in model.graph.node:
        node.name, node.doc_string = f"node {field}", f"told of {field}"
    wanted = {"name": b"node name", "doc_string": b"told of doc_string", "input": model.graph.node[0].input[0].encode()}
    text = wanted[field]
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString().replace(text, b"\xff" + text[1:]))
    with pytest.raises(StofError, match="not UTF-8"):
        load_model(path)


def test_links_in_a_circle_are_no_files(tmp_path: Path) -> None:
    save_external(linear(), tmp_path / "m.onnx")
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "weights.bin").symlink_to("weights.bin")
    with pytest.raises(StofError, match="missing"):
        load_model(tmp_path / "m.onnx")
    with pytest.raises(StofError, match="no such file"):
        load_model(tmp_path / "weights.bin")
    check_target(tmp_path / "weights.bin", tmp_path / "m.onnx")


def test_checker_failures_are_explained(tmp_path: Path) -> None:
    model = linear()
    model.graph.node[1].op_type = "NoSuchOperator"
    with pytest.raises(StofError, match=r"checker refuses the model.*NoSuchOperator"):
        _load(model, tmp_path)
    model = linear()
    model.graph.node[0].input[0] = "nowhere"
    with pytest.raises(StofError, match=r"checker refuses the model.*nowhere"):
        _load(model, tmp_path)
    model = linear()
    model.ir_version = 10_000
    with pytest.raises(StofError, match="IR version 10000"):
        _load(model, tmp_path)


def test_cycle_is_refused(tmp_path: Path) -> None:
    model = linear()
    model.graph.node[0].input[0] = "y"
    with pytest.raises(StofError, match="checker refuses the model"):
        _load(model, tmp_path)


def test_wrong_order_is_sorted(tmp_path: Path) -> None:
    model = branching()
    nodes = list(model.graph.node)
    shuffled = [nodes[i] for i in (3, 2, 0, 1)]
    expected = [n.name for n in nodes]
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in shuffled]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    loaded = _load(model, tmp_path)
    assert [n.name for n in loaded.graph.nodes] == expected
    assert loaded.notes == ["repaired: nodes were not in topological order"]


def test_missing_import_is_added(tmp_path: Path) -> None:
    model = linear()
    model.graph.node[1].op_type, model.graph.node[1].domain = "FastGelu", "com.microsoft"
    loaded = _load(model, tmp_path)
    assert loaded.notes == ["repaired: domain com.microsoft was not imported; imported com.microsoft version 1"]
    save_model(loaded, tmp_path / "out.onnx")
    ort.InferenceSession(str(tmp_path / "out.onnx"))


def test_overridable_initializers_are_not_constants(tmp_path: Path) -> None:
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [8]))
    loaded = _load(model, tmp_path)
    tensors = loaded.graph.tensors()
    assert isinstance(tensors["w"], gs.Constant) and isinstance(tensors["b"], gs.Variable)
    save_model(loaded, tmp_path / "out.onnx")
    assert onnx.load(str(tmp_path / "out.onnx")) == model


def test_constants_are_lazy_and_read_only(tmp_path: Path) -> None:
    weight = _load(linear(), tmp_path).graph.tensors()["w"]
    assert not isinstance(weight._values, np.ndarray) and weight.shape == [8, 8]
    with pytest.raises(ValueError, match="read-only"):
        weight.values[0, 0] = 1


def test_size_zero_is_refused(tmp_path: Path) -> None:
    model = linear()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0
    with pytest.raises(StofError, match="input 'x': an axis has size 0"):
        _load(model, tmp_path)


def test_shapes_are_applied(tmp_path: Path) -> None:
    model = _load(linear(), tmp_path)
    apply_shapes(model, parse_shapes(["x:2x8:4x8:16x8"]))
    assert model.dim_ranges == {"batch": DimRange(2, 4, 16)}
    assert model.input_ranges == {"x": (DimRange(2, 4, 16), DimRange(8, 8, 8))}
    assert model.graph.inputs[0].shape == ["batch", 8]
    model = _load(linear(), tmp_path)
    apply_shapes(model, parse_shapes(["x:4x8"]))
    assert model.graph.inputs[0].shape == model.graph.outputs[0].shape == [4, 8]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (["y:1x8"], "no input 'y'.*Its inputs are: x"),
        (["x:1x2x3"], "has 2 axes, the shape has 3"),
        (["x:4x9"], "axis 1 has size 8 in the model"),
        (["x:4x8", "x:4x8"], "already has a shape"),
    ],
)
def test_impossible_shapes(shapes: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(StofError, match=message):
        apply_shapes(_load(linear(), tmp_path), parse_shapes(shapes))


def test_axes_of_one_name_have_one_size(tmp_path: Path) -> None:
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch"]))
    loaded = _load(model, tmp_path)
    with pytest.raises(StofError, match="'batch'"):
        apply_shapes(loaded, parse_shapes(["x:4x8", "z:5"]))


def test_initializer_types_that_numpy_lacks(tmp_path: Path) -> None:
    raw = np.arange(8, dtype=np.uint16).tobytes()
    model = linear()
    model.graph.initializer.append(
        helper.make_tensor("half", TensorProto.BFLOAT16, [8], raw, raw=True),
    )
    model.graph.node.append(helper.make_node("Cast", ["half"], ["h"], to=TensorProto.FLOAT))
    model.graph.output.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [8]))
    loaded = _load(model, tmp_path)
    _ = loaded.graph.tensors()["half"].values
    save_model(loaded, tmp_path / "out.onnx")
    saved = onnx.load(str(tmp_path / "out.onnx"))
    assert saved == model
    assert numpy_helper.to_array(saved.graph.initializer[0]).shape == (8, 8)
