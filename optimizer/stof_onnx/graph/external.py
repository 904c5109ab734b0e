"""External data: tensors whose bytes lie in files beside the model. Checked, and read only one tensor at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from stof_onnx.errors import StofError
from stof_onnx.graph.walk import model_tensors


@dataclass(frozen=True)
class ExternalSlice:
    """Where a tensor's bytes lie."""

    file: Path
    offset: int
    length: int


def is_external(tensor: onnx.TensorProto) -> bool:
    """True when the tensor's bytes are in another file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def tensor_nbytes(tensor: onnx.TensorProto) -> int:
    """Size of the raw little-endian data of `tensor` (4-bit types are packed two to a byte)."""
    count = int(np.prod(tensor.dims, dtype=np.int64))
    return (count * _element_bits(tensor.data_type) + 7) // 8


def _element_bits(data_type: int) -> int:
    name = onnx.TensorProto.DataType.Name(data_type)
    if name.endswith("INT4") or name.startswith("FLOAT4"):
        return 4
    if name.startswith("FLOAT8"):
        return 8
    if name == "BFLOAT16":
        return 16
    return int(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(data_type)).itemsize) * 8


def locate(tensor: onnx.TensorProto, base_dir: Path) -> ExternalSlice:
    """Finds the bytes of an external tensor.

    Raises:
        StofError: no location, a location outside `base_dir`, a missing file, or one that is too short.
    """
    entries = {e.key: e.value for e in tensor.external_data}
    where = f"external data of tensor '{tensor.name}'"
    location = entries.get("location", "")
    if not location:
        raise StofError("no file is named", where, "Export the model again")
    folder = Path(os.path.realpath(base_dir))
    file = Path(os.path.realpath(folder / location))  # Path.resolve raises where links go in a circle
    if Path(location).is_absolute() or not file.is_relative_to(folder):
        raise StofError(f"the location '{location}' leaves the model's folder", where, "Move the data beside the model")
    if not file.is_file():
        raise StofError(f"the file {base_dir / location} is missing", where, "Put it beside the model")
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or tensor_nbytes(tensor))
    except ValueError as error:
        raise StofError("offset and length must be integers", where, "Export the model again") from error
    size = file.stat().st_size
    if offset < 0 or length != tensor_nbytes(tensor) or offset + length > size:
        what = (
            f"bytes {offset} to {offset + length} of {base_dir / location} ({size} bytes) "
            f"do not hold the {tensor_nbytes(tensor)} bytes of the tensor"
        )
        raise StofError(what, where, "The data file is cut short or belongs to another model")
    return ExternalSlice(file, offset, length)


def check_external_files(proto: onnx.ModelProto, base_dir: Path) -> None:
    """Raises StofError for the first external tensor whose bytes can not be found."""
    for tensor in model_tensors(proto):
        if is_external(tensor):
            locate(tensor, base_dir)


def external_files(proto: onnx.ModelProto, base_dir: Path) -> set[Path]:
    """The data files that the model's tensors lie in."""
    return {locate(t, base_dir).file for t in model_tensors(proto) if is_external(t)}


def read_tensor(tensor: onnx.TensorProto, base_dir: Path) -> np.ndarray:
    """The values of `tensor`, read from its file when it is external."""
    if not is_external(tensor):
        return np.array(onnx.numpy_helper.to_array(tensor))
    loaded = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=_bytes(tensor, base_dir))
    return np.array(onnx.numpy_helper.to_array(loaded))


def load_tensor(tensor: onnx.TensorProto, base_dir: Path) -> None:
    """Puts the bytes of an external tensor into it."""
    tensor.raw_data = _bytes(tensor, base_dir)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


def _bytes(tensor: onnx.TensorProto, base_dir: Path) -> bytes:
    place = locate(tensor, base_dir)
    with place.file.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)
