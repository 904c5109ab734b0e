"""What the library exports and needs, and the registry of the lean runtime (no GPU) loading it."""

from __future__ import annotations

import ctypes as ct
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trt.plugins.host import Host, Node, fields

ALLOWED_NEEDS = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"}


def run(program: str, *arguments: str) -> str:
    found = shutil.which(program) or shutil.which(program, path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip(f"needs {program}")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=True).stdout


def test_exports_what_tensorrt_looks_for_and_nothing_else(host: Host) -> None:
    exported = {line.split()[-1] for line in run("nm", "-D", "--defined-only", str(host.library)).splitlines()}
    assert exported == {"setLoggerFinder", "getCreators" if host.v3 else "getPluginCreators"}


def test_needs_nothing_but_the_c_library(host: Host) -> None:
    lines = [line for line in run("readelf", "-d", str(host.library)).splitlines() if "(NEEDED)" in line]
    needed = {line.split("[")[1].rstrip("]") for line in lines}
    assert needed and needed <= ALLOWED_NEEDS
    undefined = run("nm", "-D", "--undefined-only", str(host.library))
    assert "nvinfer" not in undefined and "cuda" not in undefined


def test_carries_machine_code_for_every_architecture(host: Host) -> None:
    listed = run("cuobjdump", "--list-elf", str(host.library))
    assert "sm_80.cubin" in listed and "sm_90a.cubin" in listed


# In a process of its own: a registry that crashes or prints to the terminal shows as such.
REGISTRY = """
import json, sys
import numpy as np
import tensorrt_lean_bindings as trt

request = json.loads(sys.stdin.read())
registry = trt.get_plugin_registry()
before = len(registry.all_creators)
registry.load_library(request["library"])
mine = [c for c in registry.all_creators if c.name == "StofAttention"]
creator = registry.get_creator("StofAttention", "1", "stof")
kinds = trt.PluginFieldType
types = {1: kinds.FLOAT32, 5: kinds.INT32, 6: kinds.CHAR, 8: kinds.UNKNOWN}
dtypes = {1: np.float32, 5: np.int32, 6: np.int8, 8: np.int8}
made = []
for given in request["nodes"]:
    data = [np.frombuffer(bytes.fromhex(d), dtypes[t]) for _, t, d in given]
    collection = trt.PluginFieldCollection([trt.PluginField(n, x, types[t]) for (n, t, _), x in zip(given, data)])
    made.append(creator.create_plugin("node", collection, trt.TensorRTPhase.RUNTIME) is not None)
print(json.dumps({
    "added": len(registry.all_creators) - before,
    "identity": [[c.plugin_version, c.plugin_namespace, type(c).__name__] for c in mine],
    "declared": [f.name for f in creator.field_names],
    "made": made,
}))
"""


def node_fields(attributes: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(name, kind, data.hex()) for name, kind, data, _ in fields(attributes)]


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_lean_bindings") is None, reason="needs tensorrt-lean-cu13")
def test_the_lean_runtime_loads_it_and_creates_plugins(host: Host) -> None:
    if not host.v3:
        pytest.skip("TensorRT 11 knows no IPluginV2")
    node = Node(bias_kind="relative", kv_kind="length")
    plugin = host.create(node.attributes())
    assert plugin
    stored = plugin.serialize()
    damaged = stored[:-1] + bytes([stored[-1] ^ 1])
    requests = [
        node_fields(node.attributes()),
        node_fields(Node(layout="packed").attributes()),
        [("stof_config", 8, stored.hex())],
        node_fields(node.attributes() | {"kernel": "fast"}),
        [("stof_config", 8, damaged.hex())],
        [],
    ]
    done = subprocess.run(
        [sys.executable, "-c", REGISTRY],
        input=json.dumps({"library": str(host.library), "nodes": requests}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["added"] == 2
    assert seen["identity"] == [["1", "stof", "IPluginCreatorV3One"]]
    assert set(seen["declared"]) == {text.split(":")[0] for text in host.describe()[3:]}
    assert seen["made"] == [True, True, True, False, False, False]
    messages = done.stdout + done.stderr
    for words in ("'kernel' is 'fast'", "damaged (checksum)", "attribute 'scale' is missing"):
        assert words in messages


def test_two_loaded_copies_keep_to_themselves(host: Host, tmp_path: Path) -> None:
    """As engines with plugin libraries of different builds do in one process."""
    copy = tmp_path / "libstof_plugins_copy.so"
    shutil.copy(host.library, copy)
    first = ct.c_void_p(host.c.host_load(str(host.library).encode(), b"StofAttention"))
    second = ct.c_void_p(host.c.host_load(str(copy).encode(), b"StofAttention"))
    assert first.value and second.value and first.value != second.value
