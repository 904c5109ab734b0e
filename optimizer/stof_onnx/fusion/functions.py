"""Fused regions in the portable file: a model-local function for each distinct one, of the original operators."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper, numpy_helper

from stof_onnx.attention.functions import DOMAIN
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates import Instance

PREFIX = "StofFusedRegion"
NORM_ATTRIBUTES = ("kind", "epsilon", "has_bias", "has_residual", "has_scale", "has_shift", "keep_sum")
PAIR_ATTRIBUTES = ("hidden", "inner", "outer", "inner_bias", "outer_bias", "has_residual")
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "gemm_epilogue": ("activation", "has_bias", "has_residual", "transposed"),
    "gated_mlp": ("activation", "has_bias", "transposed"),
    "projections": ("has_bias",),
    "norm": (*NORM_ATTRIBUTES, "vectors"),
    "gemm_norm": (*NORM_ATTRIBUTES, "transposed", "vectors"),
    "gemm_pair": (*PAIR_ATTRIBUTES, "transposed", "vectors"),
    "chain": ("vectors",),
}
_COMMON = ("template", "config")


def function_name(segment: Segment) -> str:
    """The function of a segment: equal segments share one."""
    return f"{PREFIX}_{segment.hash}"


def is_region(node: onnx.NodeProto) -> bool:
    """Whether `node` calls a fused region of the portable file."""
    return node.domain == DOMAIN and str(node.op_type).startswith(PREFIX + "_")


def region_function(segment: Segment, instance: Instance, opset: int) -> onnx.FunctionProto:
    """The function: inputs and outputs in the template's order, the segment's operators, its numbers as constants."""
    names: dict[str, str] = {"": ""}
    names |= {name: f"in{i}" for i, name in enumerate(instance.inputs)}
    names |= {name: f"out{i}" for i, name in enumerate(instance.outputs)}
    body = []
    for i, name in enumerate(segment.constants):
        value = segment.block.tensors.value(name)
        assert value is not None
        names[name] = f"c{i}"
        body.append(helper.make_node("Constant", [], [names[name]], value=numpy_helper.from_array(value)))
    for i, operator in enumerate(segment.operators):
        node = onnx.NodeProto(op_type=operator.node.op_type, domain=operator.node.domain)
        node.attribute.extend(operator.node.attribute)
        for j, name in enumerate(operator.node.output):
            if name not in names:
                names[name] = f"t{i}_{j}"
        node.input.extend(names[name] for name in operator.node.input)
        node.output.extend(names[name] for name in operator.node.output)
        body.append(node)
    return helper.make_function(
        DOMAIN,
        function_name(segment),
        [f"in{i}" for i in range(len(instance.inputs))],  # one tensor may be x and residual
        [names[name] for name in instance.outputs],
        body,
        [helper.make_opsetid("", opset)],
        attributes=[*_COMMON, *ATTRIBUTES[instance.template]],
    )


def region_node(segment: Segment, instance: Instance, config: str) -> onnx.NodeProto:
    """The call of the function that stands for the segment.

    `transposed` has bit i set where weight i is [N, K], `vectors` where input i is a constant along the last axis.
    """
    values: dict[str, object] = dict(instance.attributes)
    values |= {"transposed": sum(1 << i for i, turned in enumerate(instance.transposed) if turned)}
    values |= {"vectors": sum(1 << i for i, name in enumerate(instance.inputs) if name in instance.vectors)}
    values |= {"template": instance.template, "config": config}
    last = segment.operators[-1].node
    node = onnx.NodeProto(op_type=function_name(segment), domain=DOMAIN)
    node.name = f"{last.name or last.output[0]}/{PREFIX}"
    node.input.extend(instance.inputs)
    node.output.extend(instance.outputs)
    wanted = (*_COMMON, *ATTRIBUTES[instance.template])
    node.attribute.extend(helper.make_attribute(name, values[name]) for name in wanted)
    return node
