"""Names of run-time sizes: two axes of one name have one size whatever the input."""

from __future__ import annotations

import logging
from math import prod

import onnx
from onnx import helper

_SMALL = 1024  # elements of an initializer that shape inference may have to read
_log = logging.getLogger(__name__)


def axis_names(proto: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    """Sizes and names of the axes of every tensor of the main graph that ONNX's shape inference can tell.

    Weights are not read. Empty when the inference fails.
    """
    bare = onnx.ModelProto(ir_version=max(proto.ir_version, 8))
    bare.opset_import.extend(proto.opset_import)
    bare.functions.extend(proto.functions)
    bare.graph.name = proto.graph.name
    bare.graph.node.extend(proto.graph.node)
    bare.graph.output.extend(proto.graph.output)
    bare.graph.value_info.extend(proto.graph.value_info)
    declared = {value.name for value in proto.graph.input}
    bare.graph.input.extend(proto.graph.input)
    for tensor in proto.graph.initializer:
        if prod(tensor.dims) <= _SMALL and tensor.data_location != onnx.TensorProto.EXTERNAL:
            bare.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            bare.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    try:
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    except Exception as error:  # the bindings raise their own types; without names nothing is shared, that is all
        _log.debug("shape inference failed: %s", error)
        return {}
    known: dict[str, tuple[int | str, ...]] = {}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        dims = value.type.tensor_type.shape.dim
        axes = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims]
        if axes and all(axes):
            known[value.name] = tuple(axes)
    return known
