"""Reads the protobuf of an ONNX file, without external data, and makes sure that it is valid."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import checker

from stof_onnx.errors import StofError
from stof_onnx.files import check_source
from stof_onnx.graph.check import check_file, check_proto
from stof_onnx.graph.external import check_external_files, is_external, load_tensor
from stof_onnx.graph.repair import mend
from stof_onnx.graph.walk import model_nodes, node_tensors


def read_valid(path: Path) -> tuple[onnx.ModelProto, list[str]]:
    """The ModelProto in `path`, valid after the repairs that the lines describe; external data not loaded.

    Raises:
        StofError: not a readable ONNX model, missing external data, or a model that no repair makes valid.
    """
    check_source(path)
    problem = _check(path)  # first: the checker has a copy of its own, and needs the memory
    proto = read_proto(path)
    check_external_files(proto, path.parent)
    for tensor in (t for node in model_nodes(proto) for t in node_tensors(node) if is_external(t)):
        load_tensor(tensor, path.parent)  # of Constant nodes: small, and the checker does not find them elsewhere
    notes = mend(proto)
    if notes:
        try:
            check_proto(proto)
            problem = None
        except checker.ValidationError as error:
            problem = error
    if problem is not None:
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else "no reason given"
        if proto.ir_version > onnx.IR_VERSION:
            advice = f"The file has IR version {proto.ir_version}; the installed onnx knows up to {onnx.IR_VERSION}"
        else:
            advice = "Export the model again, or check it with onnx.checker.check_model"
        raise StofError(f"the ONNX checker refuses the model: {reason}", str(path), advice) from problem
    return proto, notes


def _check(path: Path) -> Exception | None:
    try:
        check_file(path)
    except Exception as error:  # unreadable files raise several types; read_proto explains them
        return error
    return None


def read_proto(path: Path) -> onnx.ModelProto:
    """The ModelProto in `path`, external data not loaded.

    Raises:
        StofError: missing, empty, truncated or not an ONNX model.
    """
    where = str(path)
    check_source(path)
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
    for node in model_nodes(proto):
        names = (node.name, node.op_type, node.domain, node.doc_string, *node.input, *node.output)
        if any(isinstance(name, bytes) for name in names):  # what protobuf can not decode, it gives as bytes
            raise StofError("a name in it is not UTF-8", where, "The file may be damaged; export the model again")
    if not proto.HasField("graph") or not proto.graph.output:
        raise StofError("not an ONNX model: it has no graph with outputs", where, "Expected a binary ONNX model")
    return proto
