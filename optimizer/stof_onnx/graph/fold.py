"""Evaluates the subgraph above a tensor: what it computes when its run-time inputs are known, or when it has none.

The actual nodes are run (ONNX Runtime, or the ONNX reference evaluator where ONNX Runtime can not, or where half
precision has to round after every step), so nothing is guessed from operator names. Only constants that such a
subgraph reads are loaded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from stof_onnx.graph.shapes import SMALL, Scenario, Shapes, captured, constant_value, np_dtype, subgraphs_of

if TYPE_CHECKING:
    from stof_onnx.graph.model import LoadedModel
    from stof_onnx.graph.scenarios import Family

CACHE_BYTES = 2 << 30
_HALF = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
_log = logging.getLogger(__name__)


class FoldError(Exception):
    """A subgraph can not be evaluated; the text says which node and why."""


class Folder:
    """Values, shapes and dependencies in one scenario.

    Args:
        model: the loaded model; its graph is only read.
        scenario: sizes of the graph inputs.
    """

    def __init__(self, model: LoadedModel, scenario: Scenario) -> None:
        self.model = model
        self.scenario = scenario
        self.shapes = Shapes(model, scenario)
        self._cache: OrderedDict[int, np.ndarray] = OrderedDict()
        self._cached = 0
        self.family: Family | None = None  # the scenarios this one belongs to, where there are several

    def shape(self, tensor: gs.Tensor) -> tuple[int, ...] | None:
        """Sizes of `tensor`, None when they depend on data."""
        return self.shapes.shape(tensor)

    def dtype(self, tensor: gs.Tensor) -> np.dtype | None:
        """numpy (or ml_dtypes) dtype of `tensor`, None when unknown."""
        kind = self.shapes.facts(tensor).elem_type
        return np_dtype(kind) if kind else None

    def depends(self, tensor: gs.Tensor) -> frozenset[str]:
        """Run-time inputs whose data (not shape) `tensor` depends on."""
        return self.shapes.facts(tensor).depends

    def is_static(self, tensor: gs.Tensor) -> bool:
        """True when the value follows from the scenario alone."""
        return not self.depends(tensor)

    def value(self, tensor: gs.Tensor) -> np.ndarray | None:
        """The value of a static tensor (cached, read-only); None when it depends on data or can not be evaluated."""
        small = self.shapes.value(tensor)
        if small is not None:
            return small
        if not self.is_static(tensor):
            return None
        if id(tensor) in self._cache:
            self._cache.move_to_end(id(tensor))
            return self._cache[id(tensor)]
        try:
            (result,) = self.evaluate([tensor])
        except FoldError as error:
            _log.debug("%s", error)
            return None
        result.flags.writeable = False
        self._cache[id(tensor)] = result
        self._cached += result.nbytes
        while self._cached > CACHE_BYTES and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1].nbytes
        return result

    def scalar(self, tensor: gs.Tensor) -> float | None:
        """The value of a static tensor with one element, as float."""
        shape = self.shape(tensor)
        if shape is None or int(np.prod(shape)) != 1:
            return None
        value = self.value(tensor)
        return None if value is None else float(np.asarray(value).reshape(-1)[0])

    def producer(self, tensor: gs.Tensor) -> gs.Node | None:
        """The node that makes `tensor`, looking through the inputs of function bodies."""
        return self.resolve(tensor).inputs[0] if self.resolve(tensor).inputs else None

    def resolve(self, tensor: gs.Tensor) -> gs.Tensor:
        """`tensor`, or the caller's tensor when it is an input of a function that is called once."""
        seen = 0
        while id(tensor) in self.shapes.aliases and seen < 64:
            outer = self.shapes.aliases[id(tensor)]
            if outer is None:
                break
            tensor, seen = outer, seen + 1
        return tensor

    def evaluate(
        self, targets: Sequence[gs.Tensor], feeds: Sequence[tuple[gs.Tensor, np.ndarray]] = ()
    ) -> list[np.ndarray]:
        """Computes `targets` with the tensors in `feeds` set to the given arrays.

        Raises:
            FoldError: a target depends on data that is not fed, or no evaluator can run a node.
        """
        program = _Program(self, targets, feeds)
        return program.run()


class _Program:
    """The nodes between feeds, constants and small known values on one side and the targets on the other."""

    def __init__(
        self, folder: Folder, targets: Sequence[gs.Tensor], feeds: Sequence[tuple[gs.Tensor, np.ndarray]]
    ) -> None:
        self.folder = folder
        self.feeds = {id(folder.resolve(t)): np.asarray(a) for t, a in feeds}
        self.targets = [folder.resolve(t) for t in targets]
        self.names: dict[int, str] = {}
        self.taken: set[str] = set()
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.half = False
        self._done: set[int] = set()
        for target in self.targets:
            self._visit(target)

    def _name(self, tensor: gs.Tensor) -> str:
        if tensor.is_empty():
            return ""
        if id(tensor) not in self.names:
            name = tensor.name
            while name in self.taken:
                name += "_"
            self.names[id(tensor)] = name
            self.taken.add(name)
        return self.names[id(tensor)]

    def _visit(self, target: gs.Tensor) -> None:
        """Depth first without recursion: exported graphs are deep."""
        stack: list[tuple[gs.Tensor, bool]] = [(target, False)]
        emitted: set[int] = set()
        while stack:
            tensor, ready = stack.pop()
            tensor = self.folder.resolve(tensor)
            if tensor.is_empty() or id(tensor) in self._done:
                continue
            if self._leaf(tensor):
                self._done.add(id(tensor))
                continue
            if not tensor.inputs:
                raise FoldError(f"'{tensor.name}' is known only at run time")
            node = tensor.inputs[0]
            reads = [self.folder.resolve(t) for t in node.inputs]
            for graph in subgraphs_of(node).values():
                reads += captured(graph)
            if not ready:
                stack.append((tensor, True))
                stack += [(t, False) for t in reads if not t.is_empty() and id(t) not in self._done]
            elif id(node) not in emitted:
                emitted.add(id(node))
                self._emit(node)
                self._done |= {id(t) for t in node.outputs}

    def _leaf(self, tensor: gs.Tensor) -> bool:
        shapes = self.folder.shapes
        if id(tensor) in self.feeds:
            array = self.feeds[id(tensor)]
            self.inputs[self._name(tensor)] = array
            return True
        value = shapes.value(tensor)
        if value is None and isinstance(tensor, gs.Constant):
            value = constant_value(tensor)
        if value is None and id(tensor) in self.folder._cache:
            value = self.folder._cache[id(tensor)]
        if value is None:
            return False
        if value.size <= SMALL:
            self.initializers.append(numpy_helper.from_array(np.array(value, order="C"), self._name(tensor)))
        else:
            self.inputs[self._name(tensor)] = value
        if shapes.facts(tensor).elem_type in _HALF:
            self.half = True
        return True

    def _emit(self, node: gs.Node) -> None:
        proto = onnx.NodeProto()
        proto.CopyFrom(self.folder.shapes.proto(node))
        del proto.metadata_props[:]
        if not subgraphs_of(node):
            proto.input[:] = [self._name(self.folder.resolve(t)) for t in node.inputs]
            proto.output[:] = [self._name(t) for t in node.outputs]
        else:
            for tensor in node.outputs:
                self._name(tensor)
        if any(self.folder.shapes.facts(t).elem_type in _HALF for t in node.outputs):
            self.half = True
        self.nodes.append(proto)

    def run(self) -> list[np.ndarray]:
        names = [self._name(t) for t in self.targets]
        direct = {**self.inputs, **{i.name: i for i in self.initializers}}
        wanted = [n for n in dict.fromkeys(names) if n not in direct]
        results = {
            n: numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v
            for n, v in direct.items()
            if n in names
        }
        if wanted:
            results |= dict(zip(wanted, self._execute(wanted), strict=True))
        return [np.asarray(results[n]) for n in names]

    def _execute(self, wanted: list[str]) -> list[np.ndarray]:
        folder = self.folder
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in self.inputs.items()
        ]
        kinds = {self._name(t): folder.shapes.facts(t).elem_type for t in self.targets}
        outputs = [
            helper.make_tensor_value_info(n, kinds[n], None) if kinds.get(n) else helper.make_empty_tensor_value_info(n)
            for n in wanted
        ]
        graph = helper.make_graph(self.nodes, "fold", inputs, outputs, self.initializers)
        model = helper.make_model(
            graph,
            opset_imports=list(folder.model.proto.opset_import),
            functions=list(folder.model.proto.functions),
            ir_version=max(8, folder.model.proto.ir_version),
        )
        runners = [_run_reference, _run_ort] if self.half else [_run_ort, _run_reference]
        problems = []
        for runner in runners:
            try:
                results = [np.asarray(r) for r in runner(model, wanted, self.inputs)]
            except Exception as error:  # evaluators raise their own types
                problems.append(f"{runner.__name__[5:]}: {str(error).strip().splitlines()[0][:200]}")
                continue
            return [
                r.astype(np_dtype(kinds[n])) if kinds.get(n) and r.dtype != np_dtype(kinds[n]) else r
                for n, r in zip(wanted, results, strict=True)
            ]
        raise FoldError(f"'{wanted[0]}' can not be evaluated ({'; '.join(problems)})")


def _run_ort(model: onnx.ModelProto, wanted: list[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    if any(a.dtype.kind == "V" or a.dtype.name == "bfloat16" for a in feeds.values()):
        raise ValueError("a type that numpy does not have")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(wanted, {k: np.asarray(v, order="C") for k, v in feeds.items()}))


def _run_reference(model: onnx.ModelProto, wanted: list[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(model).run(wanted, dict(feeds)))
