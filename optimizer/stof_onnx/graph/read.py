"""Reads the protobuf of an ONNX file, without external data."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from stof_onnx.errors import StofError


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
