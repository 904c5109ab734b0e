"""Sends a model to another machine without its weights: they are drawn again there, with numpy alone.

    python -m stof_models.seeded strip MODEL -o SMALL [--above BYTES]    needs onnx; writes SMALL and SMALL.weights.json
    python -m stof_models.seeded fill SMALL                              needs numpy; writes SMALL.data

`strip` turns large weights into external tensors of SMALL.data and notes shape, dtype, mean, standard deviation and
seed of each; `fill` writes that file. A tensor's numbers depend on its own line only, and its seed on its name, so a
model and its optimized twin get the same weights. Tables that are not random (masks, biases with few distinct values,
integers) stay in the model, exact.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stof_models.errors import ExportError

DEFAULT_ABOVE = 16384  # bytes
_BLOCK = 1 << 20  # elements drawn at a time
_SAMPLE, _DISTINCT = 4096, 1024  # a tensor with fewer distinct values among so many entries is a table, not a weight
_DTYPES = {1: "float32", 10: "float16", 16: "bfloat16"}  # by ONNX's number: `fill` does without onnx
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def strip(source: Path, target: Path, above: int = DEFAULT_ABOVE, seed: int = 0) -> list[dict[str, Any]]:
    """Writes `source` without its weights above `above` bytes to `target`, and their manifest beside it.

    Returns the manifest. Raises ExportError when `source` does not load or `target` can not be written.
    """
    import onnx

    if source.resolve() == target.resolve():
        raise ExportError(f"{target} is the model itself; choose another name")
    try:
        model = onnx.load(str(source), load_external_data=False)
    except Exception as error:
        raise ExportError(f"{source} does not load as ONNX: {error}") from error
    manifest = ManifestWriter(target, seed)
    for tensor in model.graph.initializer:
        dtype = _DTYPES.get(tensor.data_type, "")
        count = int(np.prod(tensor.dims, dtype=np.int64))
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if dtype and count * _ITEMSIZE[dtype] > above:
            values = onnx.numpy_helper.to_array(tensor, str(source.parent)).reshape(-1)
            if _is_weight(values):
                manifest.take(tensor, float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64)))
                continue
        if external:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(source.parent))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    manifest.save()
    _write(target, lambda file: file.write(model.SerializeToString(deterministic=True)))
    return manifest.lines


class ManifestWriter:
    """The manifest of `model`, and the places of its weights in the data file."""

    def __init__(self, model: Path, seed: int) -> None:
        self.model, self.seed = model, seed
        self.lines: list[dict[str, Any]] = []
        self._end = 0

    def take(self, tensor: Any, mean: float, std: float) -> None:
        """Makes the ONNX `tensor` (whatever it holds) one that `fill` draws, with this mean and deviation."""
        dtype = _DTYPES[tensor.data_type]
        line = {
            "name": tensor.name,
            "shape": list(tensor.dims),
            "dtype": dtype,
            "mean": mean,
            "std": std,
            "seed": zlib.crc32(tensor.name.encode(), self.seed),
            "offset": self._end,
        }
        self.lines.append(line)
        length = int(np.prod(tensor.dims, dtype=np.int64)) * _ITEMSIZE[dtype]
        _point_at(tensor, data_path(self.model).name, self._end, length)
        self._end += -(-length // 64) * 64

    def save(self) -> None:
        text = json.dumps(self.lines, indent=0) + "\n"
        _write(manifest_path(self.model), lambda file: file.write(text.encode()))


def fill(model: Path) -> Path:
    """Draws the weights that `strip` took out of `model` and returns the file that now holds them.

    Raises ExportError when the manifest is missing or the file can not be written.
    """
    path = manifest_path(model)
    if not path.is_file():
        raise ExportError(f"{path} is missing: it comes from `strip` and travels with the model")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    target = data_path(model)

    def write(file: BinaryIO) -> None:
        for line in manifest:
            file.seek(line["offset"])
            for block in _blocks(line):
                file.write(block)

    _write(target, write)
    return target


def values_of(line: dict[str, Any]) -> np.ndarray:
    """The tensor that one line of the manifest stands for (bfloat16 as its uint16 bits)."""
    bits = np.dtype({"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[line["dtype"]])
    return np.frombuffer(b"".join(_blocks(line)), bits).reshape(line["shape"])


def manifest_path(model: Path) -> Path:
    return model.with_name(model.name + ".weights.json")


def data_path(model: Path) -> Path:
    return model.with_name(model.name + ".data")


def _is_weight(values: np.ndarray) -> bool:
    step = max(1, values.size // _SAMPLE)
    sample = np.asarray(values[::step][:_SAMPLE], np.float32)
    return bool(np.isfinite(sample).all()) and np.unique(sample).size >= min(_DISTINCT, sample.size // 2)


def _blocks(line: dict[str, Any]) -> Any:
    """Bytes of the tensor, block by block.

    A number is the sum of the four 16-bit parts of one raw 64-bit draw (near normal, within 3.5 deviations): numpy
    promises that raw draws stay the same between versions, which it does not of `standard_normal`.
    """
    count = int(np.prod(line["shape"], dtype=np.int64))
    raw = np.random.PCG64(line["seed"])
    unit = np.sqrt(4 * (65536.0**2 - 1) / 12)
    for first in range(0, count, _BLOCK):
        parts = raw.random_raw(min(_BLOCK, count - first)).astype("<u8").view("<u2").reshape(-1, 4)
        normal = (parts.sum(axis=1, dtype=np.int64) - 2 * 65535) / unit
        values = (normal * line["std"] + line["mean"]).astype(np.float32)
        if line["dtype"] == "bfloat16":
            bits = values.view(np.uint32)
            yield ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
        else:
            yield values.astype(np.dtype(line["dtype"]).newbyteorder("<")).tobytes()


def _point_at(tensor: Any, location: str, offset: int, length: int) -> None:
    for name in ("raw_data", "float_data", "int32_data"):
        tensor.ClearField(name)
    del tensor.external_data[:]
    tensor.data_location = type(tensor).EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Writes beside the target and renames, so that no half-written file is left."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ExportError(f"can not write in {path.parent}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError):
            raise ExportError(f"can not write {path}: {error.strerror}") from error
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code: 0, or 2 with one message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m stof_models.seeded", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("strip", help="write the model without its weights, and their manifest")
    command.add_argument("model", type=Path)
    command.add_argument("-o", "--output", type=Path, required=True)
    command.add_argument("--above", type=int, default=DEFAULT_ABOVE, help="bytes a weight must exceed (%(default)s)")
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser("fill", help="draw the weights again")
    command.add_argument("model", type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "strip":
            manifest = strip(arguments.model, arguments.output, arguments.above, arguments.seed)
            print(f"wrote {arguments.output} without {len(manifest)} weights")
        else:
            print(f"wrote {fill(arguments.model)}")
    except ExportError as error:
        print(f"seeded: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
