"""Files that belong together are put in place together."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from stof_onnx.files import move_together


def staged(folder: Path, content: str) -> dict[Path, Path]:
    made = folder / f"of {content}"
    made.mkdir()
    for name in ("m.onnx.data", "m.onnx"):
        (made / name).write_text(content, encoding="utf-8")
    return {made / name: folder / name for name in ("m.onnx.data", "m.onnx")}


def contents(folder: Path) -> list[str]:
    return [(folder / name).read_text(encoding="utf-8") for name in ("m.onnx.data", "m.onnx")]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interruption_leaves_no_mixture(
    tmp_path: Path, after: int, interruption: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    move_together(staged(tmp_path, "old"), tmp_path)
    replace, done = os.replace, []

    def interrupted(source: Path, target: Path) -> None:
        if len(done) == after:
            done.append("interrupted")
            raise interruption
        replace(source, target)
        done.append(target.name)
        if after == 2 == len(done):
            raise interruption

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(interruption):
        move_together(staged(tmp_path, "new"), tmp_path)
    assert contents(tmp_path) == ["new", "new"]


def test_two_at_once_leave_the_files_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def slow(source: Path, target: Path) -> None:
        replace(source, target)
        time.sleep(0.03)

    monkeypatch.setattr(os, "replace", slow)
    every = [staged(tmp_path, str(i)) for i in range(6)]
    threads = [threading.Thread(target=move_together, args=(files, tmp_path)) for files in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data, model = contents(tmp_path)
    assert data == model


def test_a_file_that_can_not_be_moved_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        move_together({tmp_path / "no such": tmp_path / "file"}, tmp_path)
