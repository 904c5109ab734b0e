"""What every reader of a fused attention operator asks of its node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.rounding import NO_EMPTY_ROWS, lossy_constant, lossy_reason, unknown_note
from stof_onnx.attention.types import BiasKind, BiasTerm, NewNode, Refusal
from stof_onnx.graph.model import node_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stof_onnx.graph.fold import Folder
    from stof_onnx.graph.model import LoadedModel


class Refused(Exception):
    """Ends the reading of an operator; carries the reason."""


@dataclass(frozen=True)
class FusedSite:
    """One node with its surroundings. `folder` knows shapes and values at the largest sizes, `others` at the probes."""

    model: LoadedModel
    graph: gs.Graph
    node: gs.Node
    folder: Folder
    others: tuple[Folder, ...]
    assume_no_empty_rows: bool = False

    @property
    def name(self) -> str:
        return node_label(self.node)

    def refusal(self, reason: str) -> Refusal:
        return Refusal(reason, (self.name,), self.name)

    def version(self, domain: str) -> int:
        """The version of `domain` that this node follows: of its function where it lies in one, else of the model."""
        imports = self.graph.import_domains if isinstance(self.graph, gs.Function) else None
        for entry in imports or self.model.proto.opset_import:
            if entry.domain == domain or (domain == "" and entry.domain == "ai.onnx"):
                return int(entry.version)
        return self.model.opset

    def input(self, index: int) -> gs.Tensor | None:
        """An input, None when it is left out."""
        if index >= len(self.node.inputs) or self.node.inputs[index].is_empty():
            return None
        return self.node.inputs[index]

    def attribute(self, name: str, default: float) -> float:
        """A number. Raises Refused when the enclosing function's caller sets it."""
        value = self.node.attrs.get(name, default)
        if isinstance(value, gs.Node.AttributeRef):
            raise Refused(f"attribute {name} is set by the caller of the function around the node")
        return float(value)

    def integer(self, name: str, default: int) -> int:
        return int(self.attribute(name, default))

    def refuse_inputs(self, **indices: int) -> None:
        """Refused when one of these inputs is given."""
        for what, index in indices.items():
            if self.input(index) is not None:
                raise Refused(f"input {what} is given")

    def refuse_outputs(self, **indices: int) -> None:
        """Refused when one of these outputs is used."""
        for what, index in indices.items():
            if self.is_used(index):
                raise Refused(f"output {what} is used")

    def is_used(self, index: int) -> bool:
        """Whether an output has a reader or is an output of the graph."""
        if index >= len(self.node.outputs) or self.node.outputs[index].is_empty():
            return False
        tensor = self.node.outputs[index]
        return bool(tensor.outputs) or any(tensor is out for out in self.graph.outputs)

    def variable(self, what: str) -> gs.Variable:
        """A tensor that a NewNode will make for this site."""
        return gs.Variable(f"{self.name}/stof_{what}")

    def split(self, tensor: gs.Tensor, sizes: Sequence[int], names: Sequence[str]) -> tuple[NewNode, list[gs.Variable]]:
        """The operator that cuts the last axis of a rank 3 tensor into parts of those sizes."""
        parts = [self.variable(name) for name in names]
        counts = gs.Constant("split", np.array(list(sizes), np.int64))
        return NewNode("Split", (tensor, counts), tuple(parts), {"axis": 2}), parts

    def dense_bias(self, tensor: gs.Tensor | None, dtype: np.dtype, alone: bool) -> tuple[BiasTerm, tuple[str, ...]]:
        """`tensor` as an exact bias, with lines for the report; `alone`: no other mask hides keys.

        Raises:
            Refused: it holds constants that mean something else when they are added in `dtype`.
        """
        if tensor is None:
            return BiasTerm(BiasKind.NONE), ()
        bias = BiasTerm(BiasKind.DENSE, tensor=tensor, shape=self.shape(tensor), dtype=self.dtype(tensor))
        constant, complete = lossy_constant(tensor, dtype, self.folder, alone)
        if constant is None:
            return bias, () if complete else (unknown_note(tensor, dtype),)
        if not self.assume_no_empty_rows:
            raise Refused(lossy_reason(constant, dtype))
        return bias, (NO_EMPTY_ROWS,)

    def shape(self, tensor: gs.Tensor) -> tuple[int, ...]:
        """The sizes of a tensor. Raises Refused when they are not known."""
        shape = self.folder.shape(tensor)
        if shape is None:
            raise Refused(f"the shape of '{tensor.name}' is not known: it depends on run-time data")
        return tuple(shape)

    def is_dynamic(self, tensor: gs.Tensor, axis: int) -> bool:
        """Whether the size of an axis differs between the sizes that the inputs may have."""
        return any(self._moves(tensor, axis))

    def is_unbounded(self, tensor: gs.Tensor, axis: int) -> bool:
        """Whether nothing bounds the size of an axis."""
        family = self.folder.family
        unbounded = family.unbounded if family is not None else (False,) * len(self.others)
        return any(m and u for m, u in zip(self._moves(tensor, axis), unbounded, strict=True))

    def _moves(self, tensor: gs.Tensor, axis: int) -> list[bool]:
        size = self.shape(tensor)[axis]
        shapes = [other.shape(tensor) for other in self.others]
        return [shape is None or shape[axis] != size for shape in shapes]

    def dtype(self, tensor: gs.Tensor) -> np.dtype:
        """The element type of a tensor. Raises Refused when it is not known."""
        dtype = self.folder.dtype(tensor)
        if dtype is None:
            raise Refused(f"the type of '{tensor.name}' is not known")
        return np.dtype(dtype)
