"""Constants whose values stay in the file until someone reads them, and are known to be unchanged afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues

from stof_onnx.graph.external import read_tensor

if TYPE_CHECKING:
    from stof_onnx.graph.model import LoadedModel


class StoredValues(LazyValues):
    """Lazy values that find external data beside the model, and remember the array they gave out.

    The array is read only, so a constant that still holds it still has the stored value, and saving writes the
    original tensor (byte for byte, types that numpy lacks included) instead of the array.
    """

    def __init__(self, tensor: onnx.TensorProto, base_dir: Path) -> None:
        super().__init__(tensor)
        self.base_dir = base_dir
        self.loaded: np.ndarray | None = None

    def load(self) -> np.ndarray:
        """The values, read from the file on first use."""
        if self.loaded is None:
            self.loaded = read_tensor(self.tensor, self.base_dir)
            self.loaded.flags.writeable = False
        return self.loaded


class StoredConstants:
    """The stored values of every constant that a model was imported with."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[gs.Constant, StoredValues]] = {}

    def attach(self, model: LoadedModel) -> None:
        """Replaces the lazy values of all constants in the graph, its subgraphs and its functions."""
        for graph in [*(g for g, _ in model.origin.graphs()), *model.graph.functions]:
            attributes = [v for node in graph.nodes for v in node.attrs.values()]
            for constant in [*graph.tensors().values(), *graph.outputs, *attributes]:
                if isinstance(constant, gs.Constant) and type(constant._values) is LazyValues:
                    stored = StoredValues(constant._values.tensor, model.base_dir)
                    constant._values = stored
                    self._values[id(constant)] = (constant, stored)

    def unchanged(self, constant: gs.Constant) -> onnx.TensorProto | None:
        """The original tensor of `constant`, or None when it is new or was given other values."""
        if isinstance(constant._values, LazyValues) and not isinstance(constant._values, SparseValues):
            return constant._values.tensor
        entry = self._values.get(id(constant))
        return entry[1].tensor if entry and constant._values is entry[1].loaded else None
