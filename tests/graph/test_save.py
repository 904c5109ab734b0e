"""Saving keeps what was not edited, moves weights without reading them, and never leaves half a file."""

from __future__ import annotations

import glob
import os
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.errors import StofError
from stof_onnx.graph import write
from stof_onnx.graph.model import LoadedModel, load_model
from stof_onnx.graph.save import save_model, stage_model

from tests.graph.builders import branching, decorated, linear, save_external

NODE_TESTS = sorted(glob.glob(os.path.join(os.path.dirname(onnx.__file__), "backend/test/data/node/*/model.onnx")))


def _saved(model: onnx.ModelProto, folder: Path) -> tuple[LoadedModel, onnx.ModelProto]:
    source, target = folder / "in.onnx", folder / "out.onnx"
    source.write_bytes(model.SerializeToString())
    loaded = load_model(source)
    save_model(loaded, target)
    return loaded, onnx.load(str(target))


def test_every_node_test_of_onnx_survives(tmp_path: Path) -> None:
    checked = 0
    for path in NODE_TESTS:
        original = onnx.load(path)
        opsets = [o.version for o in original.opset_import if o.domain == ""]
        empty = any(
            d.HasField("dim_value") and d.dim_value == 0
            for i in original.graph.input
            for d in i.type.tensor_type.shape.dim
        )
        if not opsets or opsets[0] < 17 or empty:
            continue
        save_model(load_model(path), tmp_path / "out.onnx")
        assert onnx.load(str(tmp_path / "out.onnx")) == original, path
        checked += 1
    assert checked > 500


@pytest.mark.parametrize("make", [decorated, branching, linear])
def test_nothing_is_lost(make: object, tmp_path: Path) -> None:
    model = make()  # type: ignore[operator]
    _, saved = _saved(model, tmp_path)
    assert saved == model


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    _saved(decorated(), tmp_path)
    first = (tmp_path / "out.onnx").read_bytes()
    save_model(load_model(tmp_path / "out.onnx"), tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == first


def test_edits_are_written_and_only_they(tmp_path: Path) -> None:
    (tmp_path / "in.onnx").write_bytes(decorated().SerializeToString())
    model = load_model(tmp_path / "in.onnx")
    relu = next(n for n in model.graph.nodes if n.name == "relu")
    extra = gs.Constant("extra", np.full(8, 3, np.float32))
    scaled = gs.Variable("scaled", np.float32, ["batch", 8])
    node = gs.Node("Mul", name="scale", inputs=[relu.outputs[0], extra], outputs=[scaled])
    bias = next(n for n in model.graph.nodes if n.name == "bias")
    bias.inputs[0] = scaled
    model.graph.nodes.insert(2, node)
    save_model(model, tmp_path / "out.onnx")
    saved, original = onnx.load(str(tmp_path / "out.onnx")), decorated()
    assert [n.name for n in saved.graph.node][:4] == ["project", "relu", "scale", "bias"]
    assert [t.name for t in saved.graph.initializer] == ["w", "b", "unused", "extra"]
    assert {v.name for v in saved.graph.value_info} == {"r", "scaled"}
    assert list(saved.graph.node[3].input) == ["scaled", "b"]
    for node_proto in original.graph.node:
        if node_proto.name != "bias":
            assert node_proto in list(saved.graph.node)
    assert saved.functions == original.functions and saved.metadata_props == original.metadata_props


def test_weights_that_an_edit_orphaned_go(tmp_path: Path) -> None:
    (tmp_path / "in.onnx").write_bytes(linear().SerializeToString())
    model = load_model(tmp_path / "in.onnx")
    model.graph.nodes[1].inputs[0] = model.graph.inputs[0]
    del model.graph.nodes[0]
    save_model(model, tmp_path / "out.onnx")
    assert [t.name for t in onnx.load(str(tmp_path / "out.onnx")).graph.initializer] == ["b"]


def test_changed_attributes_and_subgraphs(tmp_path: Path) -> None:
    (tmp_path / "in.onnx").write_bytes(branching().SerializeToString())
    model = load_model(tmp_path / "in.onnx")
    then = next(n for n in model.graph.nodes if n.op == "If").attrs["then_branch"]
    then.nodes[0].op = "Add"
    new = gs.Constant("new", np.full(8, 5, np.float32))
    then.nodes[0].inputs[1] = new
    save_model(model, tmp_path / "out.onnx")
    saved = onnx.load(str(tmp_path / "out.onnx"))
    branch = next(a.g for n in saved.graph.node for a in n.attribute if a.name == "then_branch")
    assert branch.node[0].op_type == "Add" and not branch.initializer
    assert {t.name for t in saved.graph.initializer} == {"w", "b", "new"}
    onnx.checker.check_model(saved, full_check=True)


def test_added_function_raises_the_ir_version(tmp_path: Path) -> None:
    model = linear(ir_version=3)
    model.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer
    )
    (tmp_path / "in.onnx").write_bytes(model.SerializeToString())
    loaded = load_model(tmp_path / "in.onnx")
    function = helper.make_function(
        "stof", "F", ["a"], ["c"], [helper.make_node("Neg", ["a"], ["c"])], [helper.make_opsetid("", 17)]
    )
    loaded.add_function(function)
    loaded.add_function(function)
    relu = loaded.graph.nodes[1]
    relu.op, relu.domain = "F", "stof"
    save_model(loaded, tmp_path / "out.onnx")
    saved = onnx.load(str(tmp_path / "out.onnx"))
    assert saved.ir_version == 8 and [i.name for i in saved.graph.input] == ["x"]
    assert ("stof", 1) in {(o.domain, o.version) for o in saved.opset_import}
    assert any("IR version raised from 3 to 8" in note for note in loaded.notes)
    x = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)
    values = {t.name: numpy_helper.to_array(t) for t in saved.graph.initializer}
    got = ort.InferenceSession(str(tmp_path / "out.onnx")).run(None, {"x": x})[0]
    np.testing.assert_allclose(got, -(x @ values["w"]) + values["b"], rtol=1e-5, atol=1e-6)
    other = helper.make_function(
        "stof", "F", ["a"], ["c"], [helper.make_node("Abs", ["a"], ["c"])], [helper.make_opsetid("", 17)]
    )
    with pytest.raises(StofError, match="another function stof::F"):
        loaded.add_function(other)


def test_external_data_is_moved_not_read(tmp_path: Path) -> None:
    width = 2048  # 16 MB
    model = linear(width=width)
    expected = numpy_helper.to_array(model.graph.initializer[0]).copy()
    (tmp_path / "a").mkdir()
    save_external(model, tmp_path / "a" / "in.onnx")
    target = tmp_path / "out.onnx"
    tracemalloc.start()
    loaded = load_model(tmp_path / "a" / "in.onnx")
    save_model(loaded, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "out.onnx.data").exists()
    saved = onnx.load(str(target), load_external_data=False)
    offsets = [int(e.value) for t in saved.graph.initializer for e in t.external_data if e.key == "offset"]
    assert offsets and all(o % 4096 == 0 for o in offsets)
    np.testing.assert_array_equal(numpy_helper.to_array(onnx.load(str(target)).graph.initializer[0]), expected)
    assert peak < 40 << 20  # one copy buffer, not the model (the buffer is 16 MB, as is the tensor)
    # A constant can be read wherever the process runs.
    np.testing.assert_array_equal(loaded.graph.tensors()["w"].values, expected)


def test_shared_external_bytes_are_written_once(tmp_path: Path) -> None:
    model = linear(width=64)
    save_external(model, tmp_path / "in.onnx")
    proto = onnx.load(str(tmp_path / "in.onnx"), load_external_data=False)
    twin = onnx.TensorProto()
    twin.CopyFrom(proto.graph.initializer[0])
    twin.name = "twin"
    proto.graph.initializer.append(twin)
    proto.graph.node.append(helper.make_node("MatMul", ["x", "twin"], ["t"]))
    proto.graph.output.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, ["batch", 64]))
    (tmp_path / "in.onnx").write_bytes(proto.SerializeToString())
    save_model(load_model(tmp_path / "in.onnx"), tmp_path / "out.onnx")
    places = {
        t.name: {e.key: e.value for e in t.external_data}
        for t in onnx.load(str(tmp_path / "out.onnx"), load_external_data=False).graph.initializer
    }
    assert places["w"] == places["twin"] and places["w"] != places["b"]


def test_models_above_the_protobuf_limit_get_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "PROTOBUF_LIMIT", 4096)
    model = linear(width=64)
    _, saved = _saved(model, tmp_path)
    assert (tmp_path / "out.onnx.data").stat().st_size >= 64 * 64 * 4
    assert [numpy_helper.to_array(t).tobytes() for t in saved.graph.initializer] == [
        numpy_helper.to_array(t).tobytes() for t in model.graph.initializer
    ]
    onnx.checker.check_model(str(tmp_path / "out.onnx"))


def test_static_shapes_are_written(tmp_path: Path) -> None:
    from stof_onnx.graph.inputs import apply_shapes
    from stof_onnx.options import parse_shapes

    (tmp_path / "in.onnx").write_bytes(linear().SerializeToString())
    model = load_model(tmp_path / "in.onnx")
    apply_shapes(model, parse_shapes(["x:4x8"]))
    save_model(model, tmp_path / "out.onnx")
    session = ort.InferenceSession(str(tmp_path / "out.onnx"))
    assert session.get_inputs()[0].shape == [4, 8] and session.get_outputs()[0].shape == [4, 8]
    with pytest.raises(Exception, match="invalid dimensions"):
        session.run(None, {"x": np.zeros((3, 8), np.float32)})


@pytest.mark.parametrize("link", ["same", "symbolic", "hard"])
def test_the_input_is_never_the_output(link: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    source.write_bytes(linear().SerializeToString())
    if link == "same":
        target = tmp_path / "." / "in.onnx"
    elif link == "symbolic":
        target.symlink_to(source)
    else:
        os.link(source, target)
    before = source.read_bytes()
    with pytest.raises(StofError, match="the output is the input file"):
        save_model(load_model(source), target)
    assert source.read_bytes() == before


def test_a_data_file_of_the_input_is_never_overwritten(tmp_path: Path) -> None:
    save_external(linear(), tmp_path / "in.onnx", "out.onnx.data")
    with pytest.raises(StofError, match="is a data file of the input"):
        save_model(load_model(tmp_path / "in.onnx"), tmp_path / "out.onnx")


def test_leaving_without_commit_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "in.onnx").write_bytes(linear().SerializeToString())
    target = tmp_path / "out.onnx"
    target.write_bytes(b"older")
    with stage_model(load_model(tmp_path / "in.onnx"), target) as staged:
        onnx.checker.check_model(str(staged.path))
    assert target.read_bytes() == b"older" and sorted(os.listdir(tmp_path)) == ["in.onnx", "out.onnx"]


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.onnx").write_bytes(linear().SerializeToString())
    model = load_model(tmp_path / "in.onnx")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "_bytes", full)
    with pytest.raises(StofError, match="No space left on device"):
        save_model(model, tmp_path / "out.onnx")
    assert os.listdir(tmp_path) == ["in.onnx"]
