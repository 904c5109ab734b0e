"""Merges the edited graph with the original protobuf: what was not edited is written as it was read.

onnx-graphsurgeon's own exporter loses metadata, doc strings, function overloads, attributes of rare types and
quantization annotations, and copies outer weights into subgraphs. Here each node, tensor and graph that came from the
file starts from its original protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from stof_onnx.graph.model import LoadedModel
from stof_onnx.graph.walk import all_nodes, model_nodes, used_names

FUNCTIONS_IR_VERSION = 8
_OPTIONAL_INPUT_IR_VERSION = 4


@dataclass
class ExportedModel:
    """`proto` has no initializers in its main graph; `initializers` are written after it, in order."""

    proto: onnx.ModelProto
    initializers: list[onnx.TensorProto]


def export_model(model: LoadedModel) -> ExportedModel:
    """The model to be written. Original tensors are shared with `model`, not copied; external ones stay external."""
    out = onnx.ModelProto()
    for descriptor, value in model.proto.ListFields():
        if descriptor.name not in ("graph", "functions"):
            _copy_field(out, descriptor, value)
    graph = _Exporter(model)
    out.graph.CopyFrom(graph.main_graph())
    for function in model.graph.functions:
        out.functions.append(graph.function(function))
    out.functions.extend(model.added_functions.values())
    initializers = graph.main_initializers(out.graph)
    _raise_ir_version(model, out, initializers)
    _import_domains(out)
    return ExportedModel(out, initializers)


class _Exporter:
    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.fixed = {name: r.opt for name, r in model.dim_ranges.items() if r.static}
        self.constants: dict[str, gs.Constant] = {}  # every constant that a node or output uses, by name
        self.inner_initializers: set[str] = set()

    def main_graph(self) -> onnx.GraphProto:
        graph = self._graph(self.model.graph, self.model.proto.graph)
        shapes = {t.name: t.shape for t in self.model.graph.inputs}
        for value_info in graph.input:
            _fix_axes(value_info, shapes.get(value_info.name))
        return graph

    def main_initializers(self, graph: onnx.GraphProto) -> list[onnx.TensorProto]:
        """The original initializers that are still used, in their order, then the new ones."""
        source = self.model.proto.graph
        used_before = used_names(source.node) | {o.name for o in source.output}
        overridable = {i.name for i in source.input}
        kept: list[onnx.TensorProto] = []
        names: set[str] = set()
        for tensor in source.initializer:
            constant = self.constants.get(tensor.name)
            if constant is not None:
                kept.append(self._tensor(constant))
            elif tensor.name in overridable or tensor.name not in used_before:
                kept.append(tensor)
            else:
                continue
            names.add(tensor.name)
        names |= {s.values.name for s in graph.sparse_initializer} | self.inner_initializers
        kept += [self._tensor(c) for name, c in self.constants.items() if name not in names]
        return kept

    def _graph(self, graph: gs.Graph, source: onnx.GraphProto | None) -> onnx.GraphProto:
        out = onnx.GraphProto()
        if source is None:
            out.name, out.doc_string = graph.name, graph.doc_string
            out.input.extend(OnnxExporter.export_value_info_proto(t, False) for t in graph.inputs)
            out.output.extend(OnnxExporter.export_value_info_proto(t, False) for t in graph.outputs)
        else:
            for descriptor, value in source.ListFields():
                if descriptor.name not in ("node", "initializer", "sparse_initializer", "value_info"):
                    _copy_field(out, descriptor, value)
        out.node.extend(self._node(n) for n in graph.nodes)
        self._note_constants(t for n in graph.nodes for t in n.inputs)
        self._note_constants(graph.outputs)
        self._value_info(out, graph, source)
        if source is not None:
            self._sparse(out, source)
            if source is not self.model.proto.graph:
                self._inner(out, source)
        return out

    def _note_constants(self, tensors: Iterable[gs.Tensor]) -> None:
        for tensor in tensors:
            if isinstance(tensor, gs.Constant):
                self.constants.setdefault(tensor.name, tensor)

    def _inner(self, out: onnx.GraphProto, source: onnx.GraphProto) -> None:
        for tensor in source.initializer:
            constant = self.constants.get(tensor.name)
            if constant is not None:
                out.initializer.append(self._tensor(constant))
                self.inner_initializers.add(tensor.name)

    def _sparse(self, out: onnx.GraphProto, source: onnx.GraphProto) -> None:
        used_before = used_names(source.node) | {o.name for o in source.output}
        used = used_names(out.node) | {o.name for o in out.output}
        for sparse in source.sparse_initializer:
            if sparse.values.name in used or sparse.values.name not in used_before:
                out.sparse_initializer.append(sparse)
                self.inner_initializers.add(sparse.values.name)

    def _value_info(self, out: onnx.GraphProto, graph: gs.Graph, source: onnx.GraphProto | None) -> None:
        alive = used_names(out.node) | {o for n in out.node for o in n.output}
        known = {v.name for v in [*out.input, *out.output]}
        for value_info in source.value_info if source is not None else ():
            if value_info.name in alive:
                out.value_info.append(value_info)
                known.add(value_info.name)
        for node in graph.nodes:
            if self.model.origin.node(node) is None:
                for tensor in node.outputs:
                    if tensor.name and tensor.name not in known and tensor.dtype is not None:
                        out.value_info.append(OnnxExporter.export_value_info_proto(tensor, False))
        for value_info in [*out.input, *out.output, *out.value_info]:
            for dim in value_info.type.tensor_type.shape.dim:
                if dim.dim_param in self.fixed:
                    dim.dim_value = self.fixed[dim.dim_param]

    def _node(self, node: gs.Node) -> onnx.NodeProto:
        origin = self.model.origin.node(node)
        if origin is None or origin.proto.op_type != node.op:
            out = OnnxExporter.export_node(node)
            del out.attribute[:]
            out.attribute.extend(a for name, value in node.attrs.items() for a in self._attribute(name, value))
            return out
        out = onnx.NodeProto()
        out.CopyFrom(origin.proto)
        out.name = node.name
        out.domain = node.domain or ""
        if not origin.proto.HasField("name") and not node.name:
            out.ClearField("name")
        if not origin.proto.HasField("domain") and not node.domain:
            out.ClearField("domain")
        for field, tensors in ((out.input, node.inputs), (out.output, node.outputs)):
            names = [t.name for t in tensors]
            if list(field) != names:
                del field[:]
                field.extend(names)
        del out.attribute[:]
        for attribute in origin.proto.attribute:
            name = attribute.name
            if name not in origin.attrs:  # of a type that graph-surgeon does not import
                out.attribute.append(attribute)
            elif name in node.attrs:
                out.attribute.extend(self._attribute(name, node.attrs[name], attribute, origin.attrs[name]))
        for name, value in node.attrs.items():
            if name not in origin.attrs:
                out.attribute.extend(self._attribute(name, value))
        return out

    def _attribute(
        self, name: str, value: Any, source: onnx.AttributeProto | None = None, imported: Any = None
    ) -> list[onnx.AttributeProto]:
        if isinstance(value, gs.Graph):
            out = onnx.AttributeProto(name=name, type=onnx.AttributeProto.GRAPH)
            if source is not None and source.HasField("doc_string"):
                out.doc_string = source.doc_string
            out.g.CopyFrom(self._graph(value, self.model.origin.graph(value)))
            return [out]
        if source is not None and self._unchanged(value, imported):
            return [source]
        return list(OnnxExporter.export_attributes({name: value}))

    def _unchanged(self, value: Any, imported: Any) -> bool:
        if isinstance(value, gs.Constant):
            return value is imported and self.model.constants.unchanged(value) is not None
        return value is imported or (type(value) is type(imported) and bool(value == imported))

    def _tensor(self, constant: gs.Constant) -> onnx.TensorProto:
        stored = self.model.constants.unchanged(constant)
        if stored is None:
            return OnnxExporter.export_tensor_proto(constant)
        if stored.name == constant.name:
            return stored
        renamed = onnx.TensorProto()
        renamed.CopyFrom(stored)
        renamed.name = constant.name
        return renamed

    def function(self, function: gs.Function) -> onnx.FunctionProto:
        source = self.model.origin.function(function)
        if source is None:
            return OnnxExporter.export_function(function)
        out = onnx.FunctionProto()
        for descriptor, value in source.ListFields():
            if descriptor.name != "node":
                _copy_field(out, descriptor, value)
        outer, self.constants = self.constants, {}
        nodes = [self._node(n) for n in function.nodes]
        self._note_constants(t for n in function.nodes for t in n.inputs)
        used, self.constants = self.constants, outer
        for name, constant in used.items():  # a function has no initializers: its constants are nodes
            if name not in self.inner_initializers:
                value = onnx.helper.make_attribute("value", self._tensor(constant))
                out.node.append(onnx.NodeProto(op_type="Constant", output=[name], attribute=[value]))
        out.node.extend(nodes)
        return out


def _copy_field(out: Any, descriptor: Any, value: Any) -> None:
    if _repeated(descriptor):
        getattr(out, descriptor.name).extend(value)
    elif descriptor.message_type is not None:
        getattr(out, descriptor.name).CopyFrom(value)
    else:
        setattr(out, descriptor.name, value)


def _repeated(descriptor: Any) -> bool:
    flag = getattr(descriptor, "is_repeated", None)  # protobuf >= 6.31; `label` is deprecated there
    return bool(descriptor.label == descriptor.LABEL_REPEATED) if flag is None else bool(flag)


def _fix_axes(value_info: onnx.ValueInfoProto, shape: list[int | str | None] | None) -> None:
    """Writes axes that `--shape` made static into a graph input, so that a runtime rejects other sizes."""
    tensor_type = value_info.type.tensor_type
    if shape is None:
        return
    if not tensor_type.HasField("shape"):
        for _ in shape:
            tensor_type.shape.dim.add()
    for dim, size in zip(tensor_type.shape.dim, shape, strict=True):
        if isinstance(size, int) and dim.dim_value != size:
            dim.dim_value = size


def _raise_ir_version(model: LoadedModel, out: onnx.ModelProto, initializers: list[onnx.TensorProto]) -> None:
    if not out.functions or out.ir_version >= FUNCTIONS_IR_VERSION:
        return
    if out.ir_version < _OPTIONAL_INPUT_IR_VERSION:  # there, weights had to be listed as inputs
        weights = {t.name for t in initializers}
        inputs = [i for i in out.graph.input if i.name not in weights]
        del out.graph.input[:]
        out.graph.input.extend(inputs)
    note = f"IR version raised from {out.ir_version} to {FUNCTIONS_IR_VERSION}: model-local functions need it"
    if note not in model.notes:
        model.notes.append(note)
    out.ir_version = FUNCTIONS_IR_VERSION


def _import_domains(out: onnx.ModelProto) -> None:
    imported = {o.domain for o in out.opset_import}
    domains = [n.domain for n in model_nodes(out)] + [f.domain for f in out.functions]
    for domain in dict.fromkeys(domains):
        if domain not in imported and domain not in ("", "ai.onnx"):
            out.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    for function in out.functions:
        known = {o.domain for o in function.opset_import}
        for domain in dict.fromkeys(n.domain for n in all_nodes(function.node)):
            if domain not in known and domain not in ("", "ai.onnx"):
                function.opset_import.append(onnx.helper.make_opsetid(domain, 1))
