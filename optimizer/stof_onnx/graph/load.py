"""Reads an ONNX file without its weights, repairs what can be repaired, explains what can not."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError

from stof_onnx.errors import StofError
from stof_onnx.graph import opset as opsets
from stof_onnx.graph import repair
from stof_onnx.graph.external import attach_external_data, check_external_files
from stof_onnx.graph.inputs import input_ranges, restore_overridable_inputs
from stof_onnx.graph.model import LoadedModel
from stof_onnx.graph.origin import Origin


def load_model(path: str | Path) -> LoadedModel:
    """Loads, checks and imports the ONNX model at `path`. External data stays on disk.

    Raises:
        StofError: not a readable ONNX model, missing external data, or a model that no repair makes valid.
    """
    path = Path(path)
    proto = read_proto(path)
    base_dir = path.parent
    check_external_files(proto, base_dir)
    notes = repair.make_valid(proto, path)
    source_opset = opsets.default_opset(proto, path)
    proto, converted = opsets.convert_old(proto, path)
    notes += converted
    return import_model(proto, path, source_opset, notes)


def read_proto(path: Path) -> onnx.ModelProto:
    """The ModelProto in `path`, external data not loaded.

    Raises:
        StofError: missing, empty, truncated or not an ONNX model.
    """
    where = str(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise StofError("no such file", where) from error
    except OSError as error:
        raise StofError(f"can not be read ({error.strerror})", where) from error
    if not data:
        raise StofError("the file is empty", where, "Export the model again")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        advice = "Expected a binary ONNX model (protobuf); the file may be cut short or hold something else"
        raise StofError("not a readable ONNX model", where, advice) from error
    del data
    if not proto.HasField("graph") or not proto.graph.output:
        raise StofError("not an ONNX model: it has no graph with outputs", where, "Expected a binary ONNX model")
    return proto


def import_model(proto: onnx.ModelProto, path: Path, source_opset: int, notes: list[str]) -> LoadedModel:
    """Builds the editable graph of a valid `proto` whose external data lies beside `path`."""
    try:
        graph = gs.import_onnx(proto)
    except Exception as error:  # graph-surgeon raises its own and Python's errors alike
        raise StofError(f"onnx-graphsurgeon can not import the model ({error})", str(path)) from error
    model = LoadedModel(
        path=path,
        base_dir=path.parent,
        proto=proto,
        graph=graph,
        opset=opsets.default_opset(proto, path),
        source_opset=source_opset,
        origin=Origin(graph, proto),
        notes=notes,
    )
    attach_external_data(model)
    restore_overridable_inputs(model)
    model.input_ranges = input_ranges(model)
    return model
