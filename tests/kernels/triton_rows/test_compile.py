"""Compiling without a GPU, the cache, and the packed programs."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stof_onnx.errors import StofError
from stof_onnx.kernels.cubin_expr import Expr, binary, constant, size
from stof_onnx.kernels.cubin_program import FORMAT, MAGIC, ArgKind, KernelImage, fnv1a
from stof_onnx.kernels.triton_rows import RowConfig, cache, compile_program, compile_programs, configurations
from stof_onnx.kernels.triton_rows.build import compile_kernels
from stof_onnx.kernels.triton_rows.cache import KernelCache, triton_version
from stof_onnx.kernels.triton_rows.compile import assemble, kernel_requests
from stof_onnx.kernels.triton_rows.request import ARCHS, KernelRequest

from tests.kernels.triton_rows.programs import named

needs_triton = pytest.mark.skipif(triton_version() is None, reason="needs triton")
PROGRAM = named(768, "fp16")["add_layer_norm_sum"]
CONFIG = configurations(PROGRAM)[0]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with PROGRAM for every architecture."""
    folder = tmp_path_factory.mktemp("kernels")
    compile_program(PROGRAM, CONFIG, ARCHS, cache=KernelCache(folder))
    return folder


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled what is cached")

    monkeypatch.setattr("stof_onnx.kernels.triton_rows.build._compile", refuse)


def request_of(arch: int = 90, aligned: bool = True) -> KernelRequest:
    requests = kernel_requests(PROGRAM, CONFIG, (arch,))
    return requests[0 if aligned else 1]


@needs_triton
def test_every_architecture_compiles_without_a_gpu(filled: Path, no_compiling: None) -> None:
    program = compile_program(PROGRAM, CONFIG, ARCHS, rank=3, cache=KernelCache(filled))
    assert program.archs == ARCHS
    for images in program.kernels:
        for image, arch in zip(images, ARCHS, strict=True):
            assert image.arch == arch and image.threads == 32 * CONFIG.warps
            machine, flags = struct.unpack_from("<H28xI", image.cubin, 18)
            assert image.cubin[:5] == b"\x7fELF\x02" and machine == 190  # 64 bits, CUDA
            assert arch in (flags & 0xFF, flags >> 8 & 0xFF)
            assert image.name.encode() + b"\0" in image.cubin
    launch = program.launches[0]
    shapes = [(5, 7, 768), (5, 7, 768), (768,), (768,)]
    assert [axis.evaluate(shapes) for axis in launch.grid] == [-(-35 // CONFIG.rows), 1, 1]
    rows = launch.args[-1].value
    assert isinstance(rows, Expr) and rows.evaluate(shapes) == 35
    most = (1 << 31) - CONFIG.rows
    assert rows.evaluate([(1, most, 768)]) == most and rows.evaluate([(1, most + 1, 768)]) >= 1 << 32
    assert [arg.kind for arg in launch.args] == [ArgKind.INPUT] * 4 + [ArgKind.OUTPUT] * 2 + [ArgKind.INT32]


@needs_triton
def test_equal_requests_give_equal_bytes(filled: Path, tmp_path: Path) -> None:
    again = compile_kernels([request_of()] * 3, KernelCache(tmp_path))
    assert again[0] == again[1] == again[2] == KernelCache(filled).get(request_of())
    assert len(list(tmp_path.rglob("*.kernel"))) == 1


@needs_triton
def test_a_cache_serves_a_machine_without_triton(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiling: None
) -> None:
    moved = shutil.copytree(filled, tmp_path / "moved")
    monkeypatch.setattr(cache, "triton_version", lambda: None)
    assert compile_program(PROGRAM, CONFIG, ARCHS, cache=KernelCache(moved)).archs == ARCHS


def test_without_triton_and_cache_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "triton_version", lambda: None)
    with pytest.raises(StofError, match=re.escape("Triton is not installed. pip install 'stof-onnx[fusion]'")):
        compile_program(PROGRAM, CONFIG, cache=KernelCache(tmp_path))
    with pytest.raises(StofError, match="not known"):
        KernelCache(tmp_path).put(request_of(), KernelImage(90, "k", 32, 0, 0, b""))


@needs_triton
def test_damaged_files_are_compiled_again(filled: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(filled, tmp_path / "kernels")
    kept = KernelCache(folder)
    path = next(folder.rglob(f"{request_of().digest}.kernel"))
    good = path.read_bytes()
    rng = np.random.default_rng(secrets.randbits(32))
    wrong = [b"", good[:100], good[:-1], good + b"\0", b"{}\n", b"[]\n" + good, secrets.token_bytes(1000)]
    flipped = bytearray(good)
    flipped[int(rng.integers(good.index(b"\n") + 1, len(good)))] ^= 1
    for damaged in [*wrong, bytes(flipped)]:
        path.write_bytes(damaged)
        assert kept.get(request_of()) is None
    assert compile_kernels([request_of()], kept) and path.read_bytes() == good


def test_the_newest_version_serves_a_machine_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("3.6.0", "3.10.0", "3.9.1"):
        KernelCache(tmp_path, version).put(request_of(), KernelImage(90, version, 32, 0, 0, b"cubin"))
    monkeypatch.setattr(cache, "triton_version", lambda: None)
    found = KernelCache(tmp_path).get(request_of())
    assert found and found.name == "3.10.0"
    assert KernelCache(tmp_path, "3.9.0").get(request_of()) is None


def test_everything_that_decides_the_code_is_in_the_key() -> None:
    base = request_of()
    others = [request_of(80), request_of(aligned=False)]
    changes = (("warps", 8), ("source", "x"), ("stages", 2), ("stages", 3))
    others += [KernelRequest(**{**base.__dict__, name: value}) for name, value in changes]
    assert all(KernelRequest.from_json(request.to_json()) == request for request in (base, *others))
    others += kernel_requests(PROGRAM, RowConfig(256, 8, 8), (90,)) + kernel_requests(
        named(768, "bf16")["mixed"], CONFIG, (90,)
    )
    assert len({request.digest for request in [base, *others]}) == 1 + len(others)


@needs_triton
def test_what_does_not_compile_is_one_message(tmp_path: Path) -> None:
    broken = KernelRequest(
        "import triton\n@triton.jit\ndef k(x):\n    nonsense(x)\n", "k", (("x", "*fp16"),), True, 4, 90
    )
    with pytest.raises(StofError, match=r"does not compile a kernel for sm_90: .*nonsense"):
        compile_kernels([broken], KernelCache(tmp_path))
    aborting = KernelRequest("import os\nos.abort()\n", "k", (), True, 4, 90)
    with pytest.raises(StofError, match="the compiler ended: exit code"):
        compile_kernels([aborting, aborting], KernelCache(tmp_path))
    assert not list(tmp_path.rglob("*.kernel"))


@needs_triton
def test_compiling_processes_are_used_again(tmp_path: Path) -> None:
    from stof_onnx.kernels.triton_rows import build

    build._end_idle()
    compile_kernels([request_of()], KernelCache(tmp_path / "a"), jobs=2)
    (first,) = build._idle
    compile_kernels([request_of(80)], KernelCache(tmp_path / "b"), jobs=2)
    assert build._idle == [first] and first.alive
    first._process.kill()  # such as by a machine that runs out of memory
    first._process.wait()
    compile_kernels([request_of(86)], KernelCache(tmp_path / "c"), jobs=2)
    assert build._idle[0] is not first and build._idle[0].alive
    build._end_idle()
    assert not build._idle


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(StofError, match="sm_70"):
        compile_program(PROGRAM, CONFIG, (70,))
    with pytest.raises(StofError, match="no architecture"):
        compile_programs([(PROGRAM, CONFIG, 2)], ())
    with pytest.raises(StofError, match="rank 1"):
        assemble(PROGRAM, CONFIG, 1, [])


@needs_triton
def test_two_processes_may_fill_one_cache(tmp_path: Path) -> None:
    code = (
        "from stof_onnx.kernels.triton_rows import *\n"
        "p = norm_program('rms_norm', 64, 'fp16', add=False)\n"
        "print(len(compile_programs([(p, c, 2) for c in configurations(p)[:3]], (80,), jobs=1)[0].pack()))\n"
    )
    environment = {**os.environ, "STOF_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    sizes = {run.communicate()[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0] and len(sizes) == 1
    assert len(list(tmp_path.rglob("*.kernel"))) == 6 and not list(tmp_path.rglob(".stof-*"))


def test_expressions() -> None:
    rows = size(0, 0) * size(0, 1)
    shapes = [(3, 5, 8)]
    assert rows.evaluate(shapes) == 15
    assert (rows.ceil_div(4) + 1).evaluate(shapes) == 5
    assert (rows // 4 - 1).evaluate(shapes) == 2
    assert binary("max", rows, 20).evaluate(shapes) == 20 and binary("min", rows, 20).evaluate(shapes) == 15
    assert constant(6) * 7 == constant(42) and rows * 1 is rows and rows + 0 is rows and rows.ceil_div(1) is rows
    with pytest.raises(StofError, match="divides by 0"):
        (rows // (size(0, 0) - 3)).evaluate(shapes)


def test_packed_bytes_have_the_documented_header(tmp_path: Path) -> None:
    image = KernelImage(90, "kernel", 128, 0, 2, b"\x7fELF" + bytes(61))
    packed = assemble(PROGRAM, CONFIG, 2, [image, image]).pack()
    magic, version, length, checksum = struct.unpack_from("<4I", packed)
    assert (magic, version, length) == (MAGIC, FORMAT, len(packed)) and checksum == fnv1a(packed[16:])
    assert packed[:4] == b"STFP" and len(packed) % 4 == 0
