"""A million damaged blobs of what engines store of the plugins, read under sanitizers."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.trt.plugins.test_cubin_program import sample

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "trt_plugins" / "src"
COUNT = 340_000  # of each kind


def test_a_million_damaged_blobs(tmp_path: Path) -> None:
    """Each is refused, or comes back as the bytes it was and leads nowhere outside of them."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    fuzzer, program = tmp_path / "blob_fuzz", tmp_path / "program"
    program.write_bytes(sample().pack())
    sources = [
        HERE / "blob_fuzz.cpp",
        *(SOURCES / f"{n}.cpp" for n in ("attention_config", "region_config", "cubin_program")),
    ]
    includes = [f"-I{SOURCES}", f"-I{SOURCES.parents[1] / 'cuda' / 'include'}"]
    options = [
        "-std=c++17",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]
    subprocess.run([compiler, *options, *includes, *map(str, sources), "-o", str(fuzzer)], check=True)
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    run = subprocess.run([fuzzer, str(seed), str(COUNT), program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"seed {seed}: {run.stdout}{run.stderr[-2000:]}"
    accepted = [int(number) for number in run.stdout.split()[1:4]]
    assert all(0 < number < COUNT for number in accepted), run.stdout
