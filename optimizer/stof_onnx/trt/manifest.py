"""`model.stof.json`: what an engine is, what it needs, and what was measured when it was built."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stof_onnx.errors import StofError
from stof_onnx.files import write_text

_PRECISIONS = ("fp16", "bf16", "fp32")


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def manifest_of(engine: Path) -> Path:
    """Where the manifest of an engine lies."""
    return engine.with_suffix(".json")


def write_manifest(path: Path, values: dict[str, Any]) -> None:
    """Writes the manifest beside the engine.

    Raises:
        StofError: it can not be written.
    """
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def read_manifest(engine: Path) -> dict[str, Any]:
    """The manifest beside `engine`; empty where there is none, or one of another engine."""
    try:
        values = json.loads(manifest_of(engine).read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("sha256", "") not in ("", digest(engine)):
            return {}
    except (OSError, ValueError, RecursionError):
        return {}
    return values


def precision_of(manifest: Mapping[str, Any]) -> str:
    """The precision that an engine was built in; fp16 where its manifest does not say."""
    found = manifest.get("precision")
    return found if found in _PRECISIONS else "fp16"


def plugin_library_of(engine: Path) -> Path | None:
    """The library that an engine without embedded plugins needs: STOF_PLUGIN_LIBRARY, or what its manifest names.

    Raises:
        StofError: the manifest names a file that is not there or not what it was.
    """
    plugins = read_manifest(engine).get("plugin_library")
    if not isinstance(plugins, dict) or plugins.get("embedded", True):
        return None
    if os.environ.get("STOF_PLUGIN_LIBRARY"):
        return Path(os.environ["STOF_PLUGIN_LIBRARY"])
    path = Path(str(plugins.get("path", "")))
    advice = "Set STOF_PLUGIN_LIBRARY to the library of that build, or build the engine anew"
    if not path.is_file():
        raise StofError("the engine's plugin library is missing", str(path), advice)
    if digest(path) != plugins.get("sha256"):
        raise StofError("the plugin library is not the one that the engine was built with", str(path), advice)
    return path


def check_gpu(engine: Path, arch: int) -> None:
    """Refuses an engine whose manifest says that it is for another GPU than one of compute capability `arch` / 10.

    Raises:
        StofError: see above.
    """
    values = read_manifest(engine)
    built = values.get("arch")
    if isinstance(built, int) and built != arch:
        gpu = values.get("gpu", "unknown")
        what = f"built for compute capability {built / 10:.1f} ({gpu}), this GPU has {arch / 10:.1f}"
        raise StofError(what, str(engine), "Build the engine on the GPU that it shall run on")
