"""Runs torch's exporters on a built model and puts the files in place atomically."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stof_models.errors import ExportError
from stof_models.families import family
from stof_models.families.base import Built
from stof_models.info import ExportInfo, info_path
from stof_models.options import ExportOptions

EXTERNAL_DATA_ABOVE = 1_900_000_000  # bytes of weights; protobuf stops at 2 GiB


def export_model(options: ExportOptions, path: Path) -> ExportInfo:
    """Exports `options` to `path` (and `<path>.data` for more than 2 GB) with its ExportInfo beside it.

    Raises ExportError when the architecture has no such variant, the target can not be written, or the exporter
    itself fails (its message is kept). Nothing is left behind in that case.
    """
    arch = family(options.family)
    arch.check(options)
    path = Path(path)
    if path.is_dir():
        raise ExportError(f"{path} is a folder; give a file name such as {path / (options.family + '.onnx')}")
    if not path.parent.is_dir():
        raise ExportError(f"the folder {path.parent} does not exist")
    with work_folder(path) as work:
        torch.manual_seed(options.seed)
        built = arch.build(options)
        info = ExportInfo(
            options.family, asdict(options), built.inputs, built.outputs, built.dims, built.max_dims, built.sites
        )
        target = Path(work) / path.name
        try:
            with torch.no_grad(), quiet(), built.context():
                _export(options, built, info, target)
        except Exception as error:
            raise ExportError(
                f"the {options.exporter} exporter failed: {type(error).__name__}: {_first(error)}"
            ) from error
        info.save(info_path(target))
        # The weights first: a model never points at data that is not there yet.
        for file in sorted(Path(work).iterdir(), key=lambda f: f.name == path.name):
            os.replace(file, path.parent / file.name)
    return info


def example_inputs(info: ExportInfo) -> tuple[torch.Tensor, ...]:
    """The tensors the exporter traces with: unpadded, so that no branch on their values is taken."""
    arrays = info.random_inputs(np.random.default_rng(0), padded=False)
    return tuple(torch.from_numpy(arrays[i.name]) for i in info.inputs)


def _export(options: ExportOptions, built: Built, info: ExportInfo, target: Path) -> None:
    dynamic_axes: dict[str, dict[int, str]] = {
        i.name: {axis: dim for axis, dim in enumerate(i.shape) if isinstance(dim, str)} for i in info.inputs
    }
    arguments: dict[str, Any] = {
        "input_names": [i.name for i in info.inputs],
        "output_names": list(info.outputs),
        "opset_version": options.opset,
    }
    inputs = example_inputs(info)
    weights = sum(t.numel() * t.element_size() for t in built.module.state_dict().values())
    if options.exporter == "torchscript":
        for name in info.outputs:
            dynamic_axes[name] = _output_axes(options)
        torch.onnx.export(
            built.module,
            inputs,
            str(target),
            dynamo=False,
            do_constant_folding=True,
            dynamic_axes={name: axes for name, axes in dynamic_axes.items() if axes},
            **arguments,
        )
        if weights > EXTERNAL_DATA_ABOVE:
            _gather_external_data(target)
        return
    used = {dim for axes in dynamic_axes.values() for dim in axes.values()}
    dims = {name: torch.export.Dim(name, min=1, max=info.max_dims.get(name)) for name in sorted(used)}
    shapes = tuple({axis: dims[dim] for axis, dim in dynamic_axes[i.name].items()} for i in info.inputs)
    torch.onnx.export(
        built.module,
        inputs,
        str(target),
        dynamo=True,
        dynamic_shapes=shapes if options.dynamic != "none" else None,
        external_data=weights > EXTERNAL_DATA_ABOVE,
        verbose=False,
        **arguments,
    )


def _output_axes(options: ExportOptions) -> dict[int, str]:
    return {"none": {}, "batch": {0: "batch"}, "sequence": {0: "batch", 1: "sequence"}}[options.dynamic]


def _gather_external_data(target: Path) -> None:
    """torch's TorchScript exporter writes one file a tensor; one file a model is what tools expect."""
    import onnx

    model = onnx.load(str(target))
    for file in list(target.parent.iterdir()):
        file.unlink()
    onnx.save_model(model, str(target), save_as_external_data=True, location=target.name + ".data")


@contextlib.contextmanager
def work_folder(path: Path) -> Iterator[str]:
    """A temporary folder beside the target, so that renaming into place never crosses a file system."""
    try:
        work = tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ExportError(f"can not write in {path.parent}: {error.strerror}") from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn at length about what a traced model always does; real failures are exceptions."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    # A failing TorchScript export prints its whole graph: torch.onnx.export turns that log on, whatever was set before.
    log, torch._C._jit_onnx_log = torch._C._jit_onnx_log, lambda *_: None
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._jit_onnx_log = log
        logging.disable(previous)


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
