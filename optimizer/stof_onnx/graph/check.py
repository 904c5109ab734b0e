"""The ONNX checker, on files whose weights may lie outside, and lenient where runtimes are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import checker

from stof_onnx.graph.external import is_external


def check_file(path: Path) -> None:
    """Checks the model in a file.

    Raises:
        onnx.checker.ValidationError: it is not valid ONNX.
    """
    try:
        checker.check_model(str(path))
    except checker.ValidationError as error:
        if not _lacks_shape(error):
            raise
        check_proto(onnx.load(str(path), load_external_data=False))


def check_proto(proto: onnx.ModelProto) -> None:
    """Checks a model in memory; external data is not looked at, and inputs and outputs may lack a shape.

    Raises:
        onnx.checker.ValidationError: it is not valid ONNX.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    external = [t for t in copy.graph.initializer if is_external(t)]
    kept = [t for t in copy.graph.initializer if not is_external(t)]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    _check_with_inputs(copy, external)


def check_graph(proto: onnx.ModelProto, initializers: Sequence[onnx.TensorProto]) -> None:
    """Checks a model whose main initializers are held apart; their data is not looked at.

    Raises:
        onnx.checker.ValidationError: it is not valid ONNX.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    _check_with_inputs(copy, initializers)


def _check_with_inputs(model: onnx.ModelProto, weights: Sequence[onnx.TensorProto]) -> None:
    """Checks `model` with `weights` as further graph inputs."""
    known = {i.name for i in model.graph.input}
    for tensor in weights:
        if tensor.name not in known:
            model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for value_info in (*model.graph.input, *model.graph.output):
        if value_info.type.HasField("tensor_type") and not value_info.type.tensor_type.HasField("shape"):
            value_info.type.tensor_type.shape.SetInParent()
    checker.check_model(model)


def _lacks_shape(error: checker.ValidationError) -> bool:
    return "'shape' of 'type' is required" in str(error)
