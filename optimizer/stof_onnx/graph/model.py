"""A model in memory: the original protobuf beside the editable graph. Weights stay where they are until asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from stof_onnx.errors import StofError
from stof_onnx.graph import opset as opsets
from stof_onnx.graph.inputs import input_ranges, restore_overridable_inputs
from stof_onnx.graph.origin import Origin
from stof_onnx.graph.read import read_valid
from stof_onnx.graph.stored import StoredConstants
from stof_onnx.graph.strings import without_binary_strings
from stof_onnx.options import DimRange

_SILENT = 100  # above every level of graph-surgeon's logger: what it warns of, saving restores


@dataclass
class LoadedModel:
    """What every step reads and edits.

    Attributes:
        path: the file it came from.
        base_dir: the folder that external data locations are relative to.
        proto: the model as loaded (after the repairs that `notes` lists); external data not loaded. Read only: edits
            go to `graph`, and `save_model` merges both.
        graph: the editable graph. Its constants are lazy: `.values` reads (and keeps) the data, `.shape` and `.dtype`
            do not. bfloat16 and narrower types have an `onnx.TensorProto` number as dtype.
        opset: of the default domain.
        source_opset: opset of the file, before any conversion.
        origin: which protobuf node, graph or function each object of `graph` came from.
        constants: what the file stores for each constant of `graph`.
        dim_ranges: what is known of dynamic axes: symbolic name (dim_param) to the sizes it may take.
        input_ranges: for each graph input the range of each axis, None where nothing bounds it.
        added_functions: model-local functions added by the rewrite.
        notes: lines for the report: repairs, conversions, a raised IR version.
    """

    path: Path
    base_dir: Path
    proto: onnx.ModelProto
    graph: gs.Graph
    opset: int
    source_opset: int
    origin: Origin
    constants: StoredConstants = field(default_factory=StoredConstants)
    dim_ranges: dict[str, DimRange] = field(default_factory=dict)
    input_ranges: dict[str, tuple[DimRange | None, ...]] = field(default_factory=dict)
    added_functions: dict[tuple[str, str], onnx.FunctionProto] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_function(self, function: onnx.FunctionProto) -> None:
        """Adds a model-local function (once: adding an equal one again changes nothing).

        Its domain is imported with version 1 when the file is saved, and the IR version raised to 8 if need be.

        Raises:
            StofError: the model already has a different function of that name.
        """
        key = (function.domain, function.name)
        known = self.added_functions.get(key) or next(
            (f for f in self.proto.functions if (f.domain, f.name) == key and not f.overload), None
        )
        if known is None:
            self.added_functions[key] = function
        elif known.SerializeToString(deterministic=True) != function.SerializeToString(deterministic=True):
            raise StofError(
                f"the model already has another function {function.domain}::{function.name}",
                str(self.path),
                "It was made by another version of stof-onnx: optimize the original model instead",
            )


def load_model(path: str | Path) -> LoadedModel:
    """Loads, checks and imports the ONNX model at `path`. External data stays on disk.

    Raises:
        StofError: not a readable ONNX model, missing external data, or a model that no repair makes valid.
    """
    path = Path(path)
    proto, notes = read_valid(path)
    source_opset = opsets.default_opset(proto, path)
    proto, converted = opsets.convert_old(proto, path)
    notes += converted
    return import_model(proto, path, source_opset, notes)


def import_model(proto: onnx.ModelProto, path: Path, source_opset: int, notes: list[str]) -> LoadedModel:
    """Builds the editable graph of a valid `proto` whose external data lies beside `path`."""
    try:
        with G_LOGGER.suppress(_SILENT), without_binary_strings(proto):
            graph = gs.import_onnx(proto)
    except Exception as error:  # graph-surgeon raises its own and Python's errors alike
        raise StofError(f"onnx-graphsurgeon can not import the model ({error})", str(path)) from error
    model = LoadedModel(
        path=path,
        base_dir=path.parent,
        proto=proto,
        graph=graph,
        opset=opsets.default_opset(proto, path),
        source_opset=source_opset,
        origin=Origin(graph, proto),
        notes=notes,
    )
    model.constants.attach(model)
    restore_overridable_inputs(model)
    model.input_ranges = input_ranges(model)
    return model


def node_label(node: gs.Node) -> str:
    """The name that the report uses for a node: its own, or its type and first output."""
    if node.name:
        return str(node.name)
    output = node.outputs[0].name if node.outputs else "?"
    return f"{node.op}({output})"
