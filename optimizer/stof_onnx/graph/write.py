"""Writes an exported model to disk, tensor by tensor: large weights never pass through memory as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import Message

from stof_onnx.graph.export import ExportedModel
from stof_onnx.graph.external import ExternalSlice, is_external, locate, tensor_nbytes
from stof_onnx.graph.walk import model_tensors

PROTOBUF_LIMIT = 2**31 - 1  # a larger message can not be parsed
EXTERNAL_THRESHOLD = 1024  # smaller tensors stay in the model file, as in onnx's own helper
_ALIGNMENT = 4096  # so that runtimes can map each tensor
_CHUNK = 16 << 20
_GRAPH_FIELD, _INITIALIZER_FIELD = 7, 5


def write_model(exported: ExportedModel, path: Path, base_dir: Path) -> bool:
    """Writes `path`, and `<path>.data` beside it when the model has external data or is too large for one file.

    Args:
        exported: external tensors in it name files relative to `base_dir`.

    Returns:
        True when the data file was written.
    """
    tensors = [*model_tensors(exported.proto), *exported.initializers]
    external = any(is_external(t) for t in tensors)
    size = exported.proto.ByteSize() + sum(t.ByteSize() + 16 for t in exported.initializers)
    if not external and size < PROTOBUF_LIMIT:
        _write_file(exported.proto, exported.initializers, path)
        return False
    data_path = path.with_name(path.name + ".data")
    with data_path.open("wb") as file:
        data = _DataFile(file, data_path.name, base_dir)
        for tensor in model_tensors(exported.proto):
            if is_external(tensor):
                tensor.CopyFrom(data.move(tensor))
        initializers = [data.move(t) if _movable(t) else t for t in exported.initializers]
        file.flush()
        os.fsync(file.fileno())
    _write_file(exported.proto, initializers, path)
    return True


def _movable(tensor: onnx.TensorProto) -> bool:
    if is_external(tensor):
        return True
    return tensor.data_type != onnx.TensorProto.STRING and tensor_nbytes(tensor) >= EXTERNAL_THRESHOLD


class _DataFile:
    def __init__(self, file: BinaryIO, name: str, base_dir: Path) -> None:
        self.file = file
        self.name = name
        self.base_dir = base_dir
        self._copied: dict[ExternalSlice, int] = {}

    def move(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """Writes the bytes of `tensor` into the data file; returns the tensor that refers to them there."""
        if is_external(tensor):
            source = locate(tensor, self.base_dir)
            if source not in self._copied:
                self._copied[source] = self._append(lambda: _copy(source, self.file))
            offset, length = self._copied[source], source.length
        else:
            raw = tensor.raw_data if tensor.HasField("raw_data") else onnx.numpy_helper.to_array(tensor).tobytes()
            offset, length = self._append(lambda: self.file.write(raw)), len(raw)
        out = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        out.doc_string = tensor.doc_string
        out.metadata_props.extend(tensor.metadata_props)
        out.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self.name), ("offset", str(offset)), ("length", str(length))):
            out.external_data.add(key=key, value=value)
        return out

    def _append(self, write: Callable[[], object]) -> int:
        offset = -(-self.file.tell() // _ALIGNMENT) * _ALIGNMENT
        self.file.seek(offset)
        write()
        return offset


def _copy(source: ExternalSlice, target: BinaryIO) -> None:
    """Copies a slice of a file to the current position of `target`."""
    with source.file.open("rb") as file:
        file.seek(source.offset)
        left = source.length
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise OSError(f"{source.file} was cut short while it was read")
            target.write(chunk)
            left -= len(chunk)


def _write_file(proto: onnx.ModelProto, initializers: list[onnx.TensorProto], path: Path) -> None:
    """Serializes the model with `initializers` in its main graph, one tensor in memory at a time."""
    graph = _bytes(proto.graph)
    rest = onnx.ModelProto()
    rest.CopyFrom(proto)
    rest.ClearField("graph")
    sizes = [t.ByteSize() for t in initializers]
    graph_size = len(graph) + sum(1 + len(_varint(s)) + s for s in sizes)
    with path.open("wb") as file:
        file.write(_bytes(rest))
        file.write(_tag(_GRAPH_FIELD) + _varint(graph_size))
        file.write(graph)
        for tensor, size in zip(initializers, sizes, strict=True):
            file.write(_tag(_INITIALIZER_FIELD) + _varint(size))
            file.write(_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def _bytes(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _tag(field: int) -> bytes:
    return bytes([field << 3 | 2])  # a length-delimited protobuf field


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
