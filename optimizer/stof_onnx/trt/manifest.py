"""`model.stof.json`: what an engine is, what it needs, and what was measured when it was built."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from stof_onnx.atomic import write_text


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(path: Path, values: dict[str, Any]) -> None:
    """Writes the manifest beside the engine.

    Raises:
        StofError: it can not be written.
    """
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def read_manifest(engine: Path) -> dict[str, Any]:
    """The manifest beside `engine`; empty where there is none."""
    try:
        values = json.loads(engine.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def plugin_library_of(engine: Path) -> Path | None:
    """The plugin library that an engine without embedded plugins names, where the file is what it was."""
    plugins = read_manifest(engine).get("plugin_library") or {}
    path = Path(str(plugins.get("path", "")))
    if plugins.get("embedded", True) or not path.is_file() or digest(path) != plugins.get("sha256"):
        return None
    return path
