"""Exports of models with billions of parameters in little memory: the graph is traced with weights that take no
storage, and the weights are drawn straight into the external data file.

TorchScript only. The trace runs at a short sequence with dynamic axes, whose sizes are then fixed (as
onnxruntime.tools.make_dynamic_shape_fixed does) unless dynamic ones were asked for.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import torch
from onnxscript import optimizer
from transformers.initialization import no_init_weights

from stof_models.errors import ExportError
from stof_models.export import quiet, work_folder
from stof_models.families import family
from stof_models.families.base import without_weights
from stof_models.info import ExportInfo, info_path
from stof_models.options import ExportOptions
from stof_models.seeded import ManifestWriter, fill

TRACED_SEQ = 16
FOLDED = 1024  # elements


def export_large(options: ExportOptions, path: Path, *, graph_only: bool = False) -> ExportInfo:
    """Writes `path`, its ExportInfo and weight manifest, and (unless `graph_only`) `<path>.data`.

    Raises ExportError when the options ask for something that only the ordinary export can do.
    """
    arch = family(options.family)
    arch.check(options)
    if options.exporter != "torchscript" or "sequence" not in arch.dynamic:
        raise ExportError("large models and graphs without weights are exported by torchscript, text models only")
    traced = replace(
        options, dynamic="sequence", seq=min(TRACED_SEQ, options.seq), max_seq=options.longest, seq_kv=0, batch=1
    )
    with work_folder(path) as work:
        with without_weights(), no_init_weights():
            built = arch.build(traced)
            wanted = arch.build(replace(options, dynamic="none")) if options.dynamic == "none" else built
        target = Path(work) / path.name
        inputs = tuple(_example(spec.shape, spec.dtype, built.dims) for spec in built.inputs)
        axes = {i.name: {axis: d for axis, d in enumerate(i.shape) if isinstance(d, str)} for i in built.inputs}
        try:
            with torch.no_grad(), quiet(), built.context():
                torch.onnx.export(
                    built.module,
                    inputs,
                    str(target),
                    dynamo=False,
                    opset_version=options.opset,
                    export_params=False,
                    do_constant_folding=False,
                    input_names=[i.name for i in built.inputs],
                    output_names=list(built.outputs),
                    dynamic_axes=axes | {name: {0: "batch", 1: "sequence"} for name in built.outputs},
                )
        except Exception as error:
            raise ExportError(f"the torchscript exporter failed: {type(error).__name__}: {error}") from error
        model = onnx.load(str(target))
        manifest = ManifestWriter(target, options.seed)
        tables = {name: buffer.numpy() for name, buffer in built.module.named_buffers()}
        _weights_from_inputs(model.graph, {i.name for i in built.inputs}, tables, manifest)
        if options.dynamic != "sequence":
            sizes = {"batch": options.batch, **wanted.dims}
            _fix(model.graph, sizes if options.dynamic == "none" else {d: s for d, s in sizes.items() if d != "batch"})
        onnx.save(_fold(model), str(target))
        manifest.save()
        info = ExportInfo(
            options.family, asdict(options), wanted.inputs, wanted.outputs, wanted.dims, wanted.max_dims, wanted.sites
        )
        info.save(info_path(target))
        if not graph_only:
            fill(target)
        for file in sorted(Path(work).iterdir(), key=lambda f: f.name == path.name):
            file.replace(path.parent / file.name)
    return info


def _example(shape: tuple[int | str, ...], dtype: str, dims: dict[str, int]) -> torch.Tensor:
    sizes = [d if isinstance(d, int) else dims[d] for d in shape]
    return torch.ones(sizes, dtype=getattr(torch, dtype))


def _weights_from_inputs(
    graph: onnx.GraphProto, inputs: set[str], tables: dict[str, np.ndarray], manifest: ManifestWriter
) -> None:
    """Graph inputs that are parameters become external initializers (or their transposes do); buffers stay inline."""
    transposes = {n.input[0]: n for n in graph.node if n.op_type == "Transpose"}
    uses: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
    for value in [v for v in graph.input if v.name not in inputs]:
        graph.input.remove(value)
        if value.name in tables:
            graph.initializer.append(onnx.numpy_helper.from_array(tables[value.name], value.name))
            continue
        name, dims = value.name, tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        mean, std = _distribution(name, dims)
        transpose = transposes.get(name)
        if transpose is not None and len(dims) == 2 and uses[name] == 1:
            graph.node.remove(transpose)
            name, dims = transpose.output[0], dims[::-1]
        elem_type = value.type.tensor_type.elem_type
        tensor = graph.initializer.add(name=name, data_type=elem_type, dims=dims)
        manifest.take(tensor, mean, std)


def _distribution(name: str, dims: tuple[int, ...]) -> tuple[float, float]:
    """As `families.base.finish` draws them: Linear weights are [out, in], GPT-2's [in, out]; norms stay ones."""
    if len(dims) >= 2:
        fan_in = dims[0] if any(part in name for part in ("c_attn", "c_proj", "c_fc")) else dims[1]
        return 0.0, float(fan_in) ** -0.5
    return (0.0, 0.1) if name.endswith("bias") else (1.0, 0.0)


def _fold(model: onnx.ModelProto) -> onnx.ModelProto:
    """Folds small constants, as the exporter does when it holds the weights; never touches a weight."""
    graph = onnx_ir.from_proto(model)
    optimizer.fold_constants(graph, onnx_shape_inference=True, input_size_limit=FOLDED, output_size_limit=FOLDED)
    optimizer.remove_unused_nodes(graph)
    return onnx_ir.to_proto(graph)


def _fix(graph: onnx.GraphProto, sizes: dict[str, int]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
