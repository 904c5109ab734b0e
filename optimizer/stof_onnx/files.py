"""Files of a run: what is read is checked, small ones are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from stof_onnx.errors import StofError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


def cache_root() -> Path:
    """Where builds and compiled kernels are kept: STOF_CACHE_DIR, or stof-onnx in the user's cache folder."""
    base = os.environ.get("STOF_CACHE_DIR")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stof-onnx"


def check_source(path: Path) -> None:
    """Refuses what can not be read as a file: a folder, or a device or pipe, which could block for ever.

    Raises:
        StofError: see above; also when there is no such file.
    """
    if path.is_dir():
        raise StofError("is a folder", str(path), "Name a file")
    if path.exists() and not path.is_file():
        raise StofError("is a device or a pipe", str(path), "Name a file")
    if not path.exists():
        raise StofError("no such file", str(path))


def read_source(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        StofError: it can not be read.
    """
    check_source(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise StofError(f"can not be read ({error.strerror})", str(path)) from error


def move_together(files: Mapping[Path, Path], folder: Path) -> None:
    """Renames files that belong together, key to value, in `folder`: never some of them alone, whether the user
    interrupts it or another process does the same with files of these names.

    Raises:
        OSError: one can not be renamed.
    """
    handle = -1
    with contextlib.suppress(OSError):  # a file system without locks
        handle = os.open(folder, os.O_RDONLY)
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        for source, target in files.items():
            os.replace(source, target)
    except (KeyboardInterrupt, SystemExit):
        for source, target in files.items():
            if source.exists():
                os.replace(source, target)
        raise
    finally:
        if handle >= 0:
            os.close(handle)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of `text` in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path` through a temporary file in the same folder, which no way out leaves behind.

    Raises:
        StofError: the file can not be written.
    """
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=".stof-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        temporary = ""
    except OSError as error:
        raise StofError(f"can not be written ({error.strerror})", str(path), "Choose another place") from error
    finally:  # Ctrl-C, too
        if temporary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
