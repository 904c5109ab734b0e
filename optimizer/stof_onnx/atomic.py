"""Small files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from stof_onnx.errors import StofError


def write_text(path: Path, text: str) -> None:
    """Writes `text` (UTF-8) to `path` through a temporary file in the same folder.

    Raises:
        StofError: the file can not be written.
    """
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=".stof-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise StofError(f"can not be written ({error.strerror})", str(path), "Choose another place") from error
