"""Saves a model so that the target is either what it was or the complete new file, never something between."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import onnx

from stof_onnx.errors import StofError
from stof_onnx.files import move_together
from stof_onnx.graph.check import check_graph
from stof_onnx.graph.export import ExportedModel, export_model
from stof_onnx.graph.external import external_files
from stof_onnx.graph.model import LoadedModel
from stof_onnx.graph.write import write_model


def save_model(model: LoadedModel, path: str | Path) -> None:
    """Writes `model` to `path` (and its weights to `<path>.data` when it has external data or exceeds 2 GB).

    What was not edited is written as it was read: names, shapes, metadata, doc strings, opsets, IR version, functions.
    Equal models give equal bytes.

    Raises:
        StofError: the target can not be written, or is the input or one of its data files.
    """
    with stage_model(model, path) as staged:
        staged.commit()


class StagedModel:
    """A complete model in a hidden folder beside its target. `commit` moves it there; else leaving removes it."""

    def __init__(self, folder: Path, target: Path, has_data: bool) -> None:
        self._folder = folder
        self.target = target
        self.path = folder / target.name
        self._files = [data_file(self.path)] * has_data + [self.path]

    def commit(self) -> None:
        """Puts the files in place (each by one rename; the data file first)."""
        try:
            move_together({file: self.target.with_name(file.name) for file in self._files}, self.target.parent)
        except OSError as error:
            raise _unwritable(self.target, error) from error

    def __enter__(self) -> StagedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def stage_model(model: LoadedModel, path: str | Path, exported: ExportedModel | None = None) -> StagedModel:
    """Writes `model` completely, but not yet to `path`: use the result as a context manager and call `commit`.

    Args:
        exported: `export_model(model)`, edited further.

    Raises:
        StofError: see save_model.
    """
    target = Path(path)
    check_target(target, model.path)
    check_data_files({"output": target, "output's data": data_file(target)}, model.proto, model.base_dir)
    exported = exported or export_model(model)
    check_graph(exported.proto, exported.initializers)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".stof-", dir=target.parent))
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        has_data = write_model(exported, folder / target.name, model.base_dir)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritable(target, error) from error
        raise
    return StagedModel(folder, target, has_data)


def check_target(target: Path, source: Path) -> None:
    """Refuses, before any work is done, a target that is the input or that can not be a file.

    Raises:
        StofError: see above.
    """
    if same_file(target, source):
        raise StofError("the output is the input file", str(target), "Choose another name with -o")
    if target.is_dir():
        raise StofError("the output is a folder", str(target), "Name a file")
    if target.exists() and not target.is_file():
        raise StofError("the output is a device or a pipe", str(target), "Name a file")
    if not target.parent.is_dir():
        raise StofError(f"the folder {target.parent} does not exist", str(target), "Make it first")
    if not os.access(target.parent, os.W_OK):
        raise StofError(f"the folder {target.parent} is read-only", str(target), "Choose another place with -o")


def check_other_targets(targets: Mapping[str, Path | None], models: Mapping[str, Path | None]) -> None:
    """The same for the other files of a run, by what they are: each is a file of its own and none of the `models`.

    Raises:
        StofError: see above.
    """
    taken = {what: path for what, path in models.items() if path is not None}
    for what, path in targets.items():
        if path is None:
            continue
        for other, file in taken.items():
            if same_file(path, file):
                raise StofError(f"the {what} is the {other} file", str(path), "Choose another name")
        if path.is_dir():
            raise StofError(f"the {what} is a folder", str(path), "Choose another name")
        if path.exists() and not path.is_file():
            raise StofError(f"the {what} is a device or a pipe", str(path), "Choose another name")
        if not path.parent.is_dir():
            problem = f"the {what} can not be written: the folder {path.parent} does not exist"
            raise StofError(problem, str(path), "Choose another name")
        taken[what] = path


def check_data_files(targets: Mapping[str, Path | None], proto: onnx.ModelProto, base_dir: Path) -> None:
    """Refuses targets that are files which the model's weights lie in.

    Raises:
        StofError: see above.
    """
    files = external_files(proto, base_dir)
    for what, path in targets.items():
        for file in files:
            if path is not None and same_file(path, file):
                raise StofError(f"the {what} is a data file of the input", str(path), "Choose another name")


def data_file(path: Path) -> Path:
    """Where the weights of the model at `path` are written when they do not go into it."""
    return path.with_name(path.name + ".data")


def same_file(a: Path, b: Path) -> bool:
    """True when two paths name one file, also through links."""
    if os.path.realpath(a) == os.path.realpath(b):  # Path.resolve raises where links go in a circle
        return True
    return a.exists() and b.exists() and os.path.samefile(a, b)


def _unwritable(target: Path, error: OSError) -> StofError:
    return StofError(f"can not be written ({error.strerror or error})", str(target), "Choose another place with -o")
