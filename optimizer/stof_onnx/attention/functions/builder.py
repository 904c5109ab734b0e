"""Builds one ONNX model-local function, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

DOMAIN = "stof"


class FunctionBuilder:
    """Collects the nodes of one function of domain `stof`. Every method that adds a node returns its output's name.

    The body carries the model's own opset (17 or newer): operators whose form changed since then have a method here.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
        attributes: Sequence[str] = (),
        doc: str = "",
    ) -> None:
        self._name, self._inputs, self._outputs = name, list(inputs), list(outputs)
        self._opset, self._attributes, self._doc = opset, list(attributes), doc
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._taken = {*inputs, *outputs}

    def op(self, op_type: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Adds a node with one output, named `name` (made unique) or after the operator."""
        output = self._fresh(name or op_type.lower())
        self._add(op_type, inputs, output, attributes)
        return output

    def returns(self, op_type: str, *inputs: str, output: str, **attributes: Any) -> None:
        """Adds the node that makes a function output."""
        self._add(op_type, inputs, output, attributes)

    def const(self, value: object, dtype: np.typing.DTypeLike) -> str:
        """A constant tensor; equal constants are stored once."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", name="c", value=numpy_helper.from_array(array))
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """A 1-D int64 constant (shapes, axes, starts)."""
        return self.const(list(values), np.int64)

    def attribute(self, name: str, to: int) -> str:
        """The scalar value of the call's float attribute `name`, as element type `to`."""
        value = self._fresh(name)
        node = helper.make_node("Constant", [], [value])
        reference = onnx.AttributeProto(name="value_float", ref_attr_name=name, type=onnx.AttributeProto.FLOAT)
        node.attribute.append(reference)
        self._nodes.append(node)
        return value if to == onnx.TensorProto.FLOAT else self.op("Cast", value, to=to)

    def reduce(self, op_type: str, tensor: str, axis: int) -> str:
        """A reduction that keeps its axis. ReduceSum takes axes as input since opset 13, the others since 18."""
        if op_type == "ReduceSum" or self._opset >= 18:
            return self.op(op_type, tensor, self.ints(axis), keepdims=1)
        return self.op(op_type, tensor, axes=[axis], keepdims=1)

    def build(self) -> onnx.FunctionProto:
        return helper.make_function(
            DOMAIN,
            self._name,
            self._inputs,
            self._outputs,
            self._nodes,
            [helper.make_opsetid("", self._opset)],
            attributes=self._attributes,
            doc_string=self._doc,
        )

    def _add(self, op_type: str, inputs: Sequence[str], output: str, attributes: dict[str, Any]) -> None:
        self._nodes.append(helper.make_node(op_type, list(inputs), [output], **attributes))

    def _fresh(self, name: str) -> str:
        number, candidate = 0, name
        while candidate in self._taken:
            number += 1
            candidate = f"{name}_{number}"
        self._taken.add(candidate)
        return candidate
