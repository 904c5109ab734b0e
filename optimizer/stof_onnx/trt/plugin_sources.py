"""Where the C++ and CUDA sources of the plugin library lie, and their hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stof_onnx.errors import StofError

_PACKAGE = Path(__file__).resolve().parents[1]
_BUILT = {
    "cuda": ("CMakeLists.txt", "include", "src"),
    "trt_plugins": ("CMakeLists.txt", "exports.map", "src"),
}


def source_root() -> Path:
    """The folder that holds `cuda/` and `trt_plugins/`: a checkout, or what the wheel carries.

    Raises:
        StofError: an installation without sources.
    """
    for root in (_PACKAGE.parents[1], _PACKAGE / "_native"):
        if all((root / name / "CMakeLists.txt").is_file() for name in _BUILT):
            return root
    raise StofError("this installation has no plugin sources", str(_PACKAGE), "Install stof-onnx from its wheel again")


def source_hash(root: Path) -> str:
    """SHA-256 (first 16 hex digits) over names and contents of everything that is compiled."""
    digest = hashlib.sha256()
    for folder, entries in _BUILT.items():
        for entry in entries:
            top = root / folder / entry
            files = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file())
            for file in files:
                content = file.read_bytes()
                digest.update(f"{file.relative_to(root).as_posix()}\0{len(content)}\0".encode())
                digest.update(content)
    return digest.hexdigest()[:16]
