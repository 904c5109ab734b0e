"""Compiled kernels on disk, by content. A folder of them can be copied to a machine without Triton and used there.

One file a kernel, `<cache>/kernels/triton-<version>/<digest>.kernel`: a line of JSON, then the cubin. Files appear
whole, by a rename, so any number of processes may share a folder. A damaged file counts as absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stof_onnx.errors import StofError
from stof_onnx.files import cache_root, write_bytes
from stof_onnx.kernels.cubin_program import KernelImage
from stof_onnx.kernels.triton_rows.request import KernelRequest


def triton_version() -> str | None:
    """The version of the installed Triton, which is not imported; None without."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


class KernelCache:
    """A folder of compiled kernels.

    Args:
        folder: default: `kernels` in the cache folder (STOF_CACHE_DIR).
        triton: whose kernels; default: the installed version's, or any version's where none is installed.
    """

    def __init__(self, folder: Path | None = None, triton: str | None = None) -> None:
        self.folder = folder or cache_root() / "kernels"
        self.triton = triton or triton_version()

    def get(self, request: KernelRequest) -> KernelImage | None:
        """The compiled kernel, or None."""
        for folder in self._folders():
            image = _read(folder / f"{request.digest}.kernel", request)
            if image is not None:
                return image
        return None

    def put(self, request: KernelRequest, image: KernelImage) -> None:
        """Keeps a compiled kernel.

        Raises:
            StofError: the folder can not be written.
        """
        if self.triton is None:
            raise StofError("compiled kernels are kept by Triton's version, which is not known", str(self.folder))
        folder = self.folder / f"triton-{self.triton}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            advice = "Set STOF_CACHE_DIR to a folder that can be written"
            raise StofError(f"can not be made ({error.strerror})", str(folder), advice) from error
        head = {name: value for name, value in image.__dict__.items() if name != "cubin"}
        head["sha256"] = hashlib.sha256(image.cubin).hexdigest()
        write_bytes(folder / f"{request.digest}.kernel", json.dumps(head).encode() + b"\n" + image.cubin)

    def _folders(self) -> Iterator[Path]:
        if self.triton is not None:
            yield self.folder / f"triton-{self.triton}"
        elif self.folder.is_dir():
            yield from sorted(self.folder.glob("triton-*"), key=_version_order, reverse=True)


def _version_order(folder: Path) -> list[tuple[int, str]]:
    parts = folder.name.removeprefix("triton-").split(".")
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _read(path: Path, request: KernelRequest) -> KernelImage | None:
    try:
        head, _, cubin = path.read_bytes().partition(b"\n")
        data = json.loads(head)
        if data.pop("sha256") != hashlib.sha256(cubin).hexdigest() or data["arch"] != request.arch:
            return None
        return KernelImage(**data, cubin=cubin)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
