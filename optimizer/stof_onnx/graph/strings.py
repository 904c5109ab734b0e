"""String attributes that hold bytes (plugin fields, compiled blobs): graph-surgeon can only import text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx

from stof_onnx.graph.walk import model_nodes


@contextmanager
def without_binary_strings(proto: onnx.ModelProto) -> Iterator[None]:
    """Hides attributes whose strings are not UTF-8 from the nodes of `proto`, and puts them back on leaving."""
    hidden: list[tuple[onnx.NodeProto, list[onnx.AttributeProto]]] = []
    for node in model_nodes(proto):
        text = [a for a in node.attribute if _is_text(a)]
        if len(text) != len(node.attribute):
            hidden.append((node, _copies(node.attribute)))
            _replace(node, _copies(text))
    try:
        yield
    finally:
        for node, attributes in hidden:
            _replace(node, attributes)


def _is_text(attribute: onnx.AttributeProto) -> bool:
    try:
        for value in (attribute.s, *attribute.strings):
            value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _copies(attributes: list[onnx.AttributeProto]) -> list[onnx.AttributeProto]:
    copies = []
    for attribute in attributes:
        copy = onnx.AttributeProto()
        copy.CopyFrom(attribute)
        copies.append(copy)
    return copies


def _replace(node: onnx.NodeProto, attributes: list[onnx.AttributeProto]) -> None:
    del node.attribute[:]
    node.attribute.extend(attributes)
