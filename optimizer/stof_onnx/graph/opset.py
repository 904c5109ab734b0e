"""Models below the oldest supported opset are converted, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import version_converter

from stof_onnx.errors import StofError

OLDEST_OPSET = 17


def default_opset(proto: onnx.ModelProto, path: Path) -> int:
    """The version of the default domain that `proto` imports."""
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx"):
            return int(entry.version)
    raise StofError("the model imports no version of the ONNX operators", str(path), "Export the model again")


def convert_old(proto: onnx.ModelProto, path: Path) -> tuple[onnx.ModelProto, list[str]]:
    """Returns `proto` at opset 17 or newer, and a line for the report when it had to be converted.

    Raises:
        StofError: the onnx version converter can not do it.
    """
    version = default_opset(proto, path)
    if version >= OLDEST_OPSET:
        return proto, []
    try:
        converted = version_converter.convert_version(proto, OLDEST_OPSET)
    except Exception as error:  # the converter raises RuntimeError, ValueError and its own ConvertError
        raise StofError(
            f"opset {version} can not be converted to {OLDEST_OPSET} ({str(error).strip().splitlines()[0]})",
            str(path),
            f"Export the model at opset {OLDEST_OPSET} or newer",
        ) from error
    return converted, [f"converted from opset {version} to {OLDEST_OPSET}"]
