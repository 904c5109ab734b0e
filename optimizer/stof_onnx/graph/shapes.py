"""What is known of every tensor once the graph inputs have concrete sizes: shape, small values, dependence on data.

One pass in graph order. Shape inference works node by node with the small values that are known so far (whatever
feeds Reshape, Expand, Slice, Range, ... is computed, never guessed), so it also resolves shapes that exporters compute
in the graph. Weights are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

if TYPE_CHECKING:
    from stof_onnx.graph.model import LoadedModel

SMALL = 4096  # values up to this many elements are computed during the pass
_NONDETERMINISTIC = {
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
}
# Operators without an ONNX schema whose first output has the shape and type of the first input.
_LIKE_FIRST_INPUT = {
    "BiasGelu", "FastGelu", "Gelu", "QuickGelu", "GroupNorm", "RotaryEmbedding", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "MultiHeadAttention", "GroupQueryAttention",
    "LayerNormalization",
}  # fmt: skip
# Operators that onnx defines by a function body are not always inferred node by node.
_COMPARE = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"}
_INTEGRAL = {onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scenario:
    """Concrete sizes for every graph input, and what each symbolic axis name stands for."""

    inputs: Mapping[str, tuple[int, ...]]
    symbols: Mapping[str, int]


@dataclass(frozen=True)
class Facts:
    """What is known of one tensor.

    Attributes:
        shape: sizes, or None.
        elem_type: onnx.TensorProto number, 0 when unknown.
        value: the value, where it is small and depends on no run-time data.
        depends: run-time inputs (and `<loop ...>`, `<random ...>` marks) whose data the value depends on. Shapes do
            not count: they are fixed by the scenario.
    """

    shape: tuple[int, ...] | None
    elem_type: int
    value: np.ndarray | None
    depends: frozenset[str]


_NOTHING: frozenset[str] = frozenset()
UNKNOWN = Facts(None, 0, None, frozenset({"<unknown>"}))


def elem_type(dtype: Any) -> int:
    """The onnx.TensorProto number of a graph-surgeon dtype (numpy dtype or already a number; 0 for None)."""
    if dtype is None:
        return 0
    if isinstance(dtype, int):
        return dtype
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def np_dtype(elem: int) -> np.dtype:
    """The numpy (or ml_dtypes) dtype of an onnx.TensorProto number."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(elem))


def constant_value(tensor: gs.Constant) -> np.ndarray:
    """The data of a constant, without keeping a copy in the graph (weights stay on disk)."""
    lazy = tensor._values
    return np.asarray(lazy.load() if hasattr(lazy, "load") else tensor.values)


def node_constant(node: gs.Node) -> np.ndarray | None:
    """The value of a Constant node, None for forms other than tensors and numbers."""
    attrs = node.attrs
    if "value" in attrs:
        value = attrs["value"]
        return constant_value(value) if isinstance(value, gs.Constant) else np.asarray(value)
    for key, dtype in (("value_float", "f4"), ("value_floats", "f4"), ("value_int", "i8"), ("value_ints", "i8")):
        if key in attrs and not isinstance(attrs[key], gs.Node.AttributeRef):
            return np.asarray(attrs[key], dtype=dtype)
    return None


def subgraphs_of(node: gs.Node) -> dict[str, gs.Graph]:
    """The graphs inside a node, by attribute name."""
    return {name: value for name, value in node.attrs.items() if isinstance(value, gs.Graph)}


class Shapes:
    """Facts of every tensor of a model in one scenario.

    Args:
        model: the loaded model; its graph is only read.
        scenario: sizes of the graph inputs.
    """

    def __init__(self, model: LoadedModel, scenario: Scenario) -> None:
        self.model = model
        self.scenario = scenario
        self.aliases: dict[int, gs.Tensor | None] = {}  # input of a function body -> tensor at its only call
        self.failures = 0  # nodes whose shapes can not be inferred
        self._facts: dict[int, Facts] = {}
        self._held: list[gs.Tensor] = []  # ids stay valid while the tensors live
        self._functions = {(f.domain, f.name): f for f in model.graph.functions}
        self._opsets = {e.domain: e.version for e in model.proto.opset_import}
        self._opset_imports = list(model.proto.opset_import)
        for tensor in model.graph.inputs:
            shape = scenario.inputs.get(tensor.name)
            self._set(tensor, Facts(shape, elem_type(tensor.dtype), None, frozenset({tensor.name})))
        self._graph(model.graph)

    def facts(self, tensor: gs.Tensor) -> Facts:
        """Facts of `tensor`; everything unknown when the pass did not reach it."""
        found = self._facts.get(id(tensor))
        if found is None and isinstance(tensor, gs.Constant):
            found = self._constant(tensor)
            self._set(tensor, found)
        return found or UNKNOWN

    def shape(self, tensor: gs.Tensor) -> tuple[int, ...] | None:
        return self.facts(tensor).shape

    def value(self, tensor: gs.Tensor) -> np.ndarray | None:
        return self.facts(tensor).value

    def _set(self, tensor: gs.Tensor, facts: Facts) -> None:
        self._facts[id(tensor)] = facts
        self._held.append(tensor)

    def _constant(self, tensor: gs.Constant) -> Facts:
        shape = tuple(int(d) for d in tensor.shape)
        kind = elem_type(tensor._values.dtype if hasattr(tensor._values, "load") else tensor.dtype)
        # Shapes are made of integers and a few numbers; small vectors of floats are weights and stay on disk.
        limit = SMALL if kind in _INTEGRAL else 64
        value = constant_value(tensor) if int(np.prod(shape)) <= limit else None
        return Facts(shape, kind, value, _NOTHING)

    def _graph(self, graph: gs.Graph) -> None:
        for node in graph.nodes:
            try:
                self._node(node)
            except Exception as error:  # a node that can not be inferred leaves its outputs unknown
                self.failures += 1
                _log.debug("shape inference of %s (%s) failed: %s", node.name, node.op, error)
                depends = self._depends(node)
                for i, out in enumerate(node.outputs):
                    if id(out) not in self._facts:
                        self._set(out, self._merged(node, i, Facts(None, 0, None, depends)))

    def _depends(self, node: gs.Node) -> frozenset[str]:
        if node.op in _NONDETERMINISTIC or (node.op == "Dropout" and len(node.inputs) > 2):
            return frozenset({f"<random {node.name}>"})
        sets = [self.facts(t).depends for t in node.inputs if not t.is_empty()]
        for graph in subgraphs_of(node).values():
            sets += [self.facts(t).depends for t in captured(graph)]
        return frozenset().union(*sets) if sets else _NOTHING

    def _declared(self, tensor: gs.Tensor, depends: frozenset[str]) -> Facts:
        """Facts from the model's own value_info."""
        shape = None
        if tensor.shape is not None:
            dims = [self.scenario.symbols.get(d) if isinstance(d, str) else d for d in tensor.shape]
            if all(isinstance(d, int) and d >= 0 for d in dims):
                shape = tuple(int(d) for d in dims)  # type: ignore[arg-type]
        return Facts(shape, elem_type(tensor.dtype), None, depends)

    def _node(self, node: gs.Node) -> None:
        domain = node.domain or ""
        if node.op == "Constant" and domain in ("", "ai.onnx"):
            value = node_constant(node)
            if value is None:
                raise ValueError("Constant of an unusual form")
            small = value if value.size <= SMALL else None
            kind = int(helper.np_dtype_to_tensor_dtype(value.dtype))
            self._set(node.outputs[0], Facts(value.shape, kind, small, _NOTHING))
            return
        if node.op in ("Shape", "Size") and domain in ("", "ai.onnx"):
            shape = self.shape(node.inputs[0])
            if shape is not None:
                self._set(node.outputs[0], _shape_facts(node, shape))
                return
        if (domain, node.op) in self._functions:
            self._function(node, self._functions[(domain, node.op)])
            return
        if subgraphs_of(node):
            self._control_flow(node)
            return
        depends = self._depends(node)
        facts = self._inferred(node, domain, depends)
        if not depends and all(self._small(f) for f in facts):
            facts = self._evaluated(node, facts)
        for out, fact in zip(node.outputs, facts, strict=True):
            if not out.is_empty():
                self._set(out, fact)

    @staticmethod
    def _small(facts: Facts) -> bool:
        return facts.shape is None or int(np.prod(facts.shape)) <= SMALL

    def _inferred(self, node: gs.Node, domain: str, depends: frozenset[str]) -> list[Facts]:
        version = self._opsets.get(domain, self._opsets.get("ai.onnx", 0))
        types: dict[str, onnx.TypeProto] = {}
        if onnx.defs.has(node.op, version, domain):
            schema = onnx.defs.get_schema(node.op, version, domain)
            data: dict[str, onnx.TensorProto] = {}
            inputs: dict[str, onnx.TypeProto] = {}
            for tensor in node.inputs:
                if tensor.is_empty():
                    continue
                facts = self.facts(tensor)
                inputs[tensor.name] = helper.make_tensor_type_proto(facts.elem_type, facts.shape)
                if facts.value is not None and facts.value.size <= SMALL and facts.value.dtype.kind in "iufb":
                    data[tensor.name] = numpy_helper.from_array(np.array(facts.value, order="C"))
            types = onnx.shape_inference.infer_node_outputs(
                schema, self.proto(node), inputs, data, opset_imports=self._opset_imports
            )
        result = []
        for i, out in enumerate(node.outputs):
            facts = _from_type(types.get(out.name), depends)
            if node.op in _COMPARE and domain == "":
                shapes = [self.shape(t) for t in node.inputs]
                shape = None if None in shapes else np.broadcast_shapes(*shapes)  # type: ignore[arg-type]
                facts = Facts(shape, onnx.TensorProto.BOOL, None, depends)
            facts = self._merged(node, i, facts)
            result.append(facts)
        return result

    def _merged(self, node: gs.Node, index: int, facts: Facts) -> Facts:
        """`facts` of an output, completed from the model's own value_info and from what is known of the operator."""
        if facts.shape is not None and facts.elem_type:
            return facts
        declared = self._declared(node.outputs[index], facts.depends)
        first = self.facts(node.inputs[0]) if node.inputs and not node.inputs[0].is_empty() else UNKNOWN
        like = first if index == 0 and node.op in _LIKE_FIRST_INPUT else UNKNOWN
        if node.op == "FusedMatMul":
            like = Facts(self._product_shape(node), first.elem_type, None, facts.depends)
        shape = next((s for s in (facts.shape, declared.shape, like.shape) if s is not None), None)
        kind = facts.elem_type or declared.elem_type or like.elem_type
        return Facts(shape, kind, None, facts.depends)

    def _product_shape(self, node: gs.Node) -> tuple[int, ...] | None:
        """The shape of com.microsoft FusedMatMul: MatMul with the last two axes of a factor swapped where asked for."""
        shapes = [self.shape(t) for t in node.inputs[:2]]
        if any(node.attrs.get(name) for name in ("transBatchA", "transBatchB")):
            return None
        factors = []
        for shape, name in zip(shapes, ("transA", "transB"), strict=True):
            if shape is None or len(shape) < 2:
                return None
            rows, columns = shape[-1:-3:-1] if node.attrs.get(name) else shape[-2:]
            factors.append((shape[:-2], rows, columns))
        (batch_a, rows, inner), (batch_b, other, columns) = factors
        if inner != other:
            return None
        return (*np.broadcast_shapes(batch_a, batch_b), rows, columns)

    def _evaluated(self, node: gs.Node, facts: list[Facts]) -> list[Facts]:
        values = [self.facts(t).value if not t.is_empty() else None for t in node.inputs]
        if any(v is None and not t.is_empty() for v, t in zip(values, node.inputs, strict=True)):
            return facts
        feeds = {t.name: v for t, v in zip(node.inputs, values, strict=True) if v is not None}
        try:
            model = _single_node(self.proto(node), feeds, self._opset_imports)
            with np.errstate(all="ignore"):
                results = ReferenceEvaluator(model).run(None, feeds)
        except Exception as error:  # not every operator has a reference implementation
            _log.debug("evaluation of %s (%s) failed: %s", node.name, node.op, error)
            return facts
        done = []
        for fact, result in zip(facts, results, strict=False):
            array = np.asarray(result)
            if array.size > SMALL or (array.dtype.kind not in "iufb" and fact.elem_type != onnx.TensorProto.BFLOAT16):
                done.append(fact)
                continue
            if fact.elem_type and array.dtype != np_dtype(fact.elem_type):
                array = array.astype(np_dtype(fact.elem_type))
            done.append(Facts(array.shape, fact.elem_type, array, _NOTHING))
        return done + facts[len(done) :]

    def proto(self, node: gs.Node) -> onnx.NodeProto:
        """The node as protobuf, with the names its tensors have now."""
        origin = self.model.origin.node(node)
        if origin is not None:
            names = [t.name for t in node.inputs]
            if list(origin.proto.input) == names and list(origin.proto.output) == [t.name for t in node.outputs]:
                return origin.proto
        return OnnxExporter.export_node(node)

    def _function(self, node: gs.Node, function: gs.Function) -> None:
        """Facts inside a model-local function, which may be called several times: what all calls agree on."""
        before = {id(t): self._facts.get(id(t)) for t in _tensors_of(function)}
        call = dict(zip((id(t) for t in function.inputs), node.inputs, strict=False))
        for tensor in function.inputs:
            given = call.get(id(tensor))
            self._set(tensor, self.facts(given) if given is not None and not given.is_empty() else UNKNOWN)
            self.aliases[id(tensor)] = None if id(tensor) in self.aliases else given
        outer = self._opsets, self._opset_imports
        if function.import_domains:
            self._opset_imports = list(function.import_domains)
            self._opsets = {e.domain: e.version for e in self._opset_imports}
        self._graph(function)
        self._opsets, self._opset_imports = outer
        results = [self.facts(t) for t in function.outputs]
        for key, earlier in before.items():
            now = self._facts.get(key)
            if earlier is not None and now is not None:
                self._facts[key] = _agreed(earlier, now)
        for out, facts in zip(node.outputs, results, strict=False):
            if not out.is_empty():
                self._set(out, facts)

    def _control_flow(self, node: gs.Node) -> None:
        bodies = subgraphs_of(node)
        if node.op == "If":
            self._if(node, bodies)
        elif node.op in ("Loop", "Scan"):
            self._loop(node, bodies["body"])
        else:
            for body in bodies.values():
                for tensor in body.inputs:
                    self._set(tensor, UNKNOWN)
                self._graph(body)
            raise ValueError("unknown kind of control flow")

    def _if(self, node: gs.Node, bodies: dict[str, gs.Graph]) -> None:
        for body in bodies.values():
            self._graph(body)
        then, other = bodies["then_branch"], bodies["else_branch"]
        condition = self.facts(node.inputs[0])
        for i, out in enumerate(node.outputs):
            a, b = self.facts(then.outputs[i]), self.facts(other.outputs[i])
            if condition.value is not None:
                self._set(out, a if bool(condition.value.reshape(-1)[0]) else b)
            else:
                both = _agreed(a, b)
                self._set(out, Facts(both.shape, both.elem_type, None, both.depends | condition.depends))

    def _loop(self, node: gs.Node, body: gs.Graph) -> None:
        mark = frozenset({f"<loop {node.name or node.outputs[0].name}>"})
        depends = self._depends(node)
        scan_axes: list[int] = []
        if node.op == "Loop":
            carried = list(node.inputs[2:])
            self._set(body.inputs[0], Facts((), onnx.TensorProto.INT64, None, mark))
            self._set(body.inputs[1], Facts((), onnx.TensorProto.BOOL, None, mark | depends))
            states, slices, scanned, skip = body.inputs[2:], [], [], 1
        else:
            count = int(node.attrs["num_scan_inputs"])
            carried = list(node.inputs[: len(node.inputs) - count])
            states, slices, skip = body.inputs[: len(carried)], body.inputs[len(carried) :], 0
            scanned = list(node.inputs[len(carried) :])
            scan_axes = list(node.attrs.get("scan_input_axes", [0] * count))
        length: int | None = None
        for tensor, outer in zip(states, carried, strict=True):
            facts = self.facts(outer)
            self._set(tensor, Facts(facts.shape, facts.elem_type, None, facts.depends | depends | mark))
        for tensor, outer, axis in zip(slices, scanned, scan_axes, strict=True):
            facts = self.facts(outer)
            shape = None if facts.shape is None else _without_axis(facts.shape, axis)
            length = facts.shape[axis] if facts.shape is not None else None
            self._set(tensor, Facts(shape, facts.elem_type, None, facts.depends | mark))
        self._graph(body)
        changed = False
        for tensor, result in zip(states, body.outputs[skip:], strict=False):
            if self.facts(tensor).shape != self.facts(result).shape:
                facts = self.facts(tensor)
                self._set(tensor, Facts(None, facts.elem_type, None, facts.depends))
                changed = True
        if changed:
            self._graph(body)
        if node.op == "Loop" and not node.inputs[0].is_empty():
            trips = self.value(node.inputs[0])
            length = int(trips.reshape(-1)[0]) if trips is not None else None
        for i, out in enumerate(node.outputs):
            facts = self.facts(body.outputs[skip + i])
            shape = facts.shape
            if i >= len(states):
                shape = (length, *shape) if shape is not None and length is not None and node.op == "Scan" else None
            self._set(out, Facts(shape, facts.elem_type, None, (facts.depends | depends) - mark))


def captured(graph: gs.Graph) -> list[gs.Tensor]:
    """Tensors of outer graphs that a subgraph (and the graphs inside it) reads."""
    inner = {id(t) for t in graph.inputs}
    used: dict[int, gs.Tensor] = {}
    for node in graph.nodes:
        inner |= {id(t) for t in node.outputs}
        reads = list(node.inputs)
        for sub in subgraphs_of(node).values():
            reads += captured(sub)
        used |= {id(t): t for t in reads if not t.is_empty()}
    used |= {id(t): t for t in graph.outputs}
    return [t for key, t in used.items() if key not in inner and not isinstance(t, gs.Constant)]


def _tensors_of(graph: gs.Graph) -> Iterable[gs.Tensor]:
    yield from graph.inputs
    for node in graph.nodes:
        yield from node.outputs
        for sub in subgraphs_of(node).values():
            yield from _tensors_of(sub)


def _agreed(a: Facts, b: Facts) -> Facts:
    same = a.value is not None and b.value is not None and np.array_equal(a.value, b.value)
    return Facts(
        a.shape if a.shape == b.shape else None,
        a.elem_type if a.elem_type == b.elem_type else 0,
        a.value if same else None,
        a.depends | b.depends | (_NOTHING if same or a.value is b.value else frozenset({"<calls differ>"})),
    )


def _shape_facts(node: gs.Node, shape: tuple[int, ...]) -> Facts:
    if node.op == "Size":
        value = np.asarray(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)
    else:
        value = np.asarray(shape[slice(node.attrs.get("start"), node.attrs.get("end"))], dtype=np.int64)
    return Facts(value.shape, onnx.TensorProto.INT64, value, _NOTHING)


def _from_type(proto: onnx.TypeProto | None, depends: frozenset[str]) -> Facts:
    if proto is None or not proto.HasField("tensor_type"):
        return Facts(None, 0, None, depends)
    tensor = proto.tensor_type
    shape = None
    if tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim):
        shape = tuple(d.dim_value for d in tensor.shape.dim)
    return Facts(shape, tensor.elem_type, None, depends)


def _without_axis(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    axis %= len(shape)
    return shape[:axis] + shape[axis + 1 :]


def _single_node(
    node: onnx.NodeProto, feeds: Mapping[str, np.ndarray], opsets: list[onnx.OperatorSetIdProto]
) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    return helper.make_model(helper.make_graph([node], "node", inputs, outputs), opset_imports=opsets)
