"""Results on disk: append-only JSONL, one line a case; the newest line of a case and commit counts."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "attention.jsonl"


def environment(at: str) -> dict[str, Any]:
    """Date, commit, GPU, driver and torch version: the fields every line starts with."""
    import torch

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": at or commit(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
    }


def commit() -> str:
    """Short hash of HEAD, with '+' when the tree differs from it; 'unknown' outside a checkout."""
    here = {"cwd": ROOT, "capture_output": True, "text": True}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **here)  # type: ignore[call-overload]
    if head.returncode:
        return "unknown"
    dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], **here).stdout  # type: ignore[call-overload]
    return head.stdout.strip() + ("+" if dirty.strip() else "")


def append(path: Path, line: dict[str, Any]) -> None:
    """One line, written whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")


def load(path: Path) -> list[dict[str, Any]]:
    """All lines, oldest first; [] when there is no file."""
    return [json.loads(x) for x in path.read_text(encoding="utf-8").splitlines() if x.strip()] if path.exists() else []


def newest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last line of each case and kernel family, in order of first appearance.

    Peers that its run left out keep the time of the run that had them.
    """
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for x in lines:
        key = (x["case"], x["arch_path"])
        last[key] = {**x, "peers": {**last.get(key, {"peers": {}})["peers"], **x["peers"]}}
    return list(last.values())
