"""Models below the oldest supported opset are converted, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import inliner, version_converter

from stof_onnx.errors import StofError
from stof_onnx.graph.external import is_external
from stof_onnx.graph.walk import used_names

OLDEST_OPSET = 17
FIRST_PLAIN_SOFTMAX = 13  # before it Softmax flattened its input
_OLDEST_IR_VERSION = 8  # what opset 17 goes with
_OVERRIDABLE_IR_VERSION = 4


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
        plain = inliner.inline_local_functions(proto) if proto.functions else proto  # the converter skips functions
        converted = version_converter.convert_version(plain, OLDEST_OPSET)
    except Exception as error:  # the converter raises RuntimeError, ValueError and its own ConvertError
        raise StofError(
            f"opset {version} can not be converted to {OLDEST_OPSET} ({_first_line(error)})",
            str(path),
            f"Export the model at opset {OLDEST_OPSET} or newer",
        ) from error
    _restore(converted, proto)
    return converted, [f"converted from opset {version} to {OLDEST_OPSET}"]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _restore(converted: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """Puts back what the converter drops or narrows: types and shapes of inputs and outputs, doc strings, metadata."""
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if source.HasField(field):
            setattr(converted, field, getattr(source, field))
    converted.ir_version = max(source.ir_version, _OLDEST_IR_VERSION)
    del converted.metadata_props[:]
    converted.metadata_props.extend(source.metadata_props)
    graph = converted.graph
    graph.name, graph.doc_string = source.graph.name, source.graph.doc_string
    external = {t.name: t for t in source.graph.initializer if is_external(t)}
    for tensor in graph.initializer:  # older converters forget where the data is
        if tensor.name in external:
            tensor.CopyFrom(external[tensor.name])
    inputs = list(source.graph.input)
    if source.ir_version < _OVERRIDABLE_IR_VERSION:  # weights had to be listed as inputs
        weights = {t.name for t in source.graph.initializer}
        inputs = [i for i in inputs if i.name not in weights]
    for field, values in ((graph.input, inputs), (graph.output, list(source.graph.output))):
        del field[:]
        field.extend(values)
    alive = used_names(graph.node)
    kept = [v for v in graph.value_info if v.type.WhichOneof("value") and v.name in alive]
    del graph.value_info[:]
    graph.value_info.extend(kept)
