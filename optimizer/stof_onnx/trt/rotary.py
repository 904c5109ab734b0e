"""Rotary position embeddings between a projection and an attention, found by what they compute.

The operators from the projection p [B, S, H*D] to Q or K [B, H, S, D] are run by ONNX Runtime: on a probe, which tells
the cos and sin of every position, and on random numbers, which must come out as
    q[j] = p[j] cos - p[j + D/2] sin,  q[j + D/2] = p[j + D/2] cos + p[j] sin,   j < D/2
for every batch entry, head and position. So the way an exporter writes it does not matter, and nothing else passes.
Where the batch is known at run time only, both runs have another one, so that nothing can depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from stof_onnx.graph.proto_graph import ProtoGraph, attributes_of, subgraphs
from stof_onnx.graph.proto_shapes import Dim, SymbolicShapes

_FOLLOWED = {  # operators of a rotation: which of their inputs may hold what is rotated
    **dict.fromkeys(("Add", "Sub", "Mul", "Concat"), None),
    **dict.fromkeys(("Slice", "Split", "Reshape", "Transpose", "Unsqueeze", "Squeeze"), 1),
    **dict.fromkeys(("Neg", "Cast", "Identity"), 1),
}
_TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float16): 4e-3}
_BATCHES = 3, 2  # of the two runs, where the model's own is not fixed
_SMALL = 64  # elements of constants that are compared by value between layers
_QUIET = 4  # ONNX Runtime reports by exceptions
_DTYPES: dict[int, np.dtype] = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
}


@dataclass(frozen=True)
class Cut:
    """What Q, K or V takes of a projection p, and how.

    Attributes:
        projection: p.
        holds: tensors between p and the attention that hold (part of) p, both ends among them.
        nodes: everything that is computed between them.
        whole: p holds Q, K and V side by side, not only this one.
        turns: float32 [S, D/2, 2]: cos and sin; None where it is not rotated.
    """

    projection: str
    holds: frozenset[str]
    nodes: tuple[onnx.NodeProto, ...]
    whole: bool
    turns: np.ndarray | None


def paired(columns: np.ndarray, head_dim: int) -> np.ndarray:
    """Weights [K, H*D] or biases [H*D] with the partners j and j + D/2 of every head side by side.

    Q and K in this order have the scores of the old one, as the order of a sum does not matter.
    """
    heads = columns.reshape(*columns.shape[:-1], -1, 2, head_dim // 2)
    return np.ascontiguousarray(heads.swapaxes(-1, -2)).reshape(columns.shape)


@dataclass
class RotationFinder:
    """Finds the rotations of one main graph. Equal ones of other layers are run once.

    Attributes:
        model: only read.
        graph: its index.
        shapes: of its tensors.
    """

    model: onnx.ModelProto
    graph: ProtoGraph
    shapes: SymbolicShapes
    _known: dict[Hashable, np.ndarray | None] = field(default_factory=dict)

    def find(
        self, tensor: str, heads: int, head_dim: int, first: int, total: int, is_projection: Callable[[str], bool]
    ) -> Cut | None:
        """The rotation that makes `tensor` [B, H, S, D] from a projection; None where there is none to be sure of.

        Args:
            first, total: the first column of this tensor in a projection of Q, K and V, and the width of one.
            is_projection: whether a tensor is p.
        """
        return self._find(tensor, heads, head_dim, first, total, is_projection, self._turns)

    def find_plain(
        self, tensor: str, heads: int, head_dim: int, first: int, total: int, is_projection: Callable[[str], bool]
    ) -> Cut | None:
        """As `find`, for V [B, S, H, D] or [B, S, H*D]: columns of a projection as they are."""
        return self._find(tensor, heads, head_dim, first, total, is_projection, self._copied)

    def _find(
        self,
        tensor: str,
        heads: int,
        head_dim: int,
        first: int,
        total: int,
        is_projection: Callable[[str], bool],
        examine: Callable[[_Part, int, int, int], np.ndarray | None],
    ) -> Cut | None:
        followed = _Followed(self.graph, is_projection)
        if head_dim % 2 or self.graph.readers(tensor) != 1 or not followed.reaches(tensor) or followed.source == tensor:
            return None
        part = _Part.cut(self.graph, self.shapes, followed, tensor)
        if part is None or part.width not in (heads * head_dim, total):
            return None
        whole = part.width == total
        key = examine.__name__, heads, head_dim, first * whole, part.key(self.graph)
        if key not in self._known:
            self._known[key] = examine(part, heads, head_dim, first * whole)
        turns = self._known[key]
        if turns is None:
            return None
        return Cut(followed.source, frozenset(followed.holds), part.nodes, whole, turns if turns.size else None)

    def _turns(self, part: _Part, heads: int, head_dim: int, first: int) -> np.ndarray | None:
        """cos and sin [S, D/2, 2] of every position."""
        columns = slice(first, first + heads * head_dim)
        probe, random = part.rows(0), part.rows(1)
        pairs = probe[:, :, columns].reshape(*probe.shape[:2], heads, 2, head_dim // 2)
        pairs[:, :, :, 0], pairs[:, :, :, 1] = 1, 0
        probe[:, :, columns] = pairs.reshape(*probe.shape[:2], -1)
        answers = [part.run(self.model, self.graph, rows) for rows in (probe, random)]
        wanted_shapes = [(len(rows), heads, part.seq, head_dim) for rows in (probe, random)]
        if [None if a is None else a.shape for a in answers] != wanted_shapes:
            return None
        told, turned = (a.astype(np.float32) for a in answers if a is not None)
        cos, sin = told[0, 0].reshape(part.seq, 2, head_dim // 2).swapaxes(0, 1)
        for given, answer in zip(random[:, :, columns].astype(np.float32), turned, strict=True):  # one batch entry
            x, y = given.reshape(part.seq, heads, 2, head_dim // 2).transpose(2, 1, 0, 3)
            wanted = np.concatenate([x * cos - y * sin, y * cos + x * sin], -1)
            if not (np.abs(answer - wanted) <= _TOLERANCE[part.dtype] * (1 + np.abs(wanted))).all():  # NaN fails too
                return None
        return np.stack([cos, sin], -1)

    def _copied(self, part: _Part, heads: int, head_dim: int, first: int) -> np.ndarray | None:
        """Nothing, but not None, where the columns are left as they are."""
        rows = part.rows(1)
        answer = part.run(self.model, self.graph, rows)
        wanted = rows[:, :, first : first + heads * head_dim]
        shapes = (wanted.shape, (*wanted.shape[:2], heads, head_dim))
        if answer is None or answer.shape not in shapes or not np.array_equal(answer.reshape(wanted.shape), wanted):
            return None
        return np.empty(0, np.float32)


class _Followed:
    """The tensors on the ways from a projection to a tensor.

    Attributes:
        holds: those that hold (part of) the projection, it among them.
        source: the projection, once one is reached.
    """

    def __init__(self, graph: ProtoGraph, is_projection: Callable[[str], bool]) -> None:
        self.graph, self.is_projection = graph, is_projection
        self.holds: set[str] = set()
        self.source = ""
        self._seen: dict[str, bool] = {}

    def reaches(self, tensor: str) -> bool:
        """Whether `tensor` is made from one projection, by operators that a rotation has."""
        self._follow(tensor)
        return tensor in self.holds

    def allows(self, node: onnx.NodeProto) -> bool:
        """Whether a node does to the projection what a rotation may do, or only looks at its shape."""
        if node.op_type == "Shape" or not self.holds.intersection(node.input):
            return True
        followed = _FOLLOWED.get(node.op_type, 0)
        rest = () if followed is None else node.input[followed:]
        return followed != 0 and self.holds.isdisjoint(rest)

    def _follow(self, tensor: str) -> bool:
        if tensor in self._seen:
            return self._seen[tensor]
        self._seen[tensor] = False
        node = self.graph.producers.get(tensor)
        if node is None or node.domain not in ("", "ai.onnx"):
            return False
        if self.source in ("", tensor) and self.is_projection(tensor):
            self.source = tensor
            found = True
        elif node.op_type in _FOLLOWED:
            followed = [self._follow(name) for name in node.input[: _FOLLOWED[node.op_type]] if name]
            found = any(followed)
        else:
            found = False
        self._seen[tensor] = found
        if found:
            self.holds.add(tensor)
        return found


@dataclass(frozen=True)
class _Part:
    """The operators of a rotation as a model of its own.

    Attributes:
        nodes: in order.
        shapes: what Shape nodes say of tensors outside; None for the batch.
        batch, seq, width: of the projection; None where the batch is not fixed.
    """

    nodes: tuple[onnx.NodeProto, ...]
    shapes: Mapping[str, tuple[int | None, ...]]
    source: str
    output: str
    batch: int | None
    seq: int
    width: int
    dtype: np.dtype

    @staticmethod
    def cut(graph: ProtoGraph, shapes: SymbolicShapes, followed: _Followed, output: str) -> _Part | None:
        source = followed.source
        dims, dtype = shapes.dims.get(source, ()), _DTYPES.get(shapes.types.get(source, 0))
        if len(dims) != 3 or dtype is None or not isinstance(dims[1], int) or not isinstance(dims[2], int):
            return None
        wanted, outside = [output], dict[str, tuple[int | None, ...]]()
        looked, taken = set[str](), set[str]()
        while wanted:
            name = wanted.pop()
            if name in looked or name in graph.initializers or name == source:
                continue
            looked.add(name)
            node = graph.producers.get(name)
            if node is None or node.domain not in ("", "ai.onnx") or any(True for _ in subgraphs(node)):
                return None
            if node.op_type == "Shape" and node.input[0] not in followed.holds:
                seen = shapes.dims.get(node.input[0], (None, None))
                numbers = [d if isinstance(d, int) else None for d in seen]
                if None in numbers[1:] or (numbers[:1] == [None] and not _may_be_batch(seen[0], dims[0])):
                    return None
                bounds: dict[str, Any] = attributes_of(node)
                outside[name] = tuple(numbers)[bounds.get("start") : bounds.get("end")]
                continue
            if node.op_type.startswith(("Random", "Bernoulli", "Multinomial", "Dropout")):
                return None
            taken.update(node.output)
            wanted += [n for n in node.input if n]
        nodes = tuple(n for n in graph.graph.node if any(o in taken for o in n.output))
        if not all(followed.allows(node) for node in nodes):
            return None
        batch = dims[0] if isinstance(dims[0], int) else None
        return _Part(nodes, outside, source, output, batch, dims[1], dims[2], dtype)

    def key(self, graph: ProtoGraph) -> Hashable:
        """Equal for rotations that compute the same."""
        digests = {"": "", self.source: "p"} | {name: f"shape {dims}" for name, dims in self.shapes.items()}

        def of(name: str) -> str:
            if name not in digests:
                value = graph.constant(name)
                small = value is not None and value.size <= _SMALL
                digests[name] = (
                    f"{value.dtype} {value.shape} {value.tobytes().hex()}" if value is not None and small else name
                )
            return digests[name]

        for node in self.nodes:
            attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
            told = repr((node.op_type, attributes, [of(name) for name in node.input]))
            digest = hashlib.sha256(told.encode()).hexdigest()
            digests |= {name: f"{digest}.{place}" for place, name in enumerate(node.output)}
        return self.batch, self.seq, self.width, str(self.dtype), digests[self.output]

    def rows(self, number: int) -> np.ndarray:
        """Random numbers in place of the projection [B, S, W], for run `number`."""
        batch = _BATCHES[number] if self.batch is None else self.batch
        drawn = np.random.default_rng().random((batch, self.seq, self.width), np.float32)
        return (drawn - np.float32(0.5)).astype(self.dtype) * self.dtype.type(4)

    def run(self, model: onnx.ModelProto, graph: ProtoGraph, rows: np.ndarray) -> np.ndarray | None:
        """Q, K or V of a projection; None where ONNX Runtime can not."""
        read = {name for node in self.nodes for name in node.input if name}
        constants = [graph.initializers[name] for name in sorted(read) if name in graph.initializers]
        for name, dims in self.shapes.items():
            numbers = [len(rows) if d is None else d for d in dims]
            constants.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
        dtype = helper.np_dtype_to_tensor_dtype(self.dtype)
        inputs = [helper.make_tensor_value_info(self.source, dtype, rows.shape)]
        outputs = [helper.make_empty_tensor_value_info(self.output)]
        part = helper.make_graph(self.nodes, "rotation", inputs, outputs, constants)
        single = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
        options = ort.SessionOptions()
        options.log_severity_level = _QUIET
        try:
            session = ort.InferenceSession(single.SerializeToString(), options, providers=["CPUExecutionProvider"])
            return np.asarray(session.run([self.output], {self.source: rows})[0])
        except Exception:  # ONNX Runtime raises one pybind class for each status
            return None


def _may_be_batch(axis: Dim, batch: Dim) -> bool:
    """Whether an axis that is known at run time only may be the batch, whose two sizes tell what depends on it."""
    names = {None if isinstance(d, str) and d.startswith("unk__") else d for d in (axis, batch)}  # named by inference
    return not isinstance(batch, int) and (None in names or len(names) == 1)
