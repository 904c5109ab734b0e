"""The plugins' template `cubin` on a GPU without TensorRT: enqueue of both adapters, against float64."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from stof_onnx.kernels.triton_rows import RowProgram, compile_programs, reference
from stof_onnx.kernels.triton_rows.ir import DTYPE_BYTES
from stof_onnx.trt import cuda

from tests.kernels.triton_rows.programs import error_ratio, from_bytes, inputs, named, to_bytes
from tests.trt.memory import device_memory
from tests.trt.plugins.conftest import BUILT, adapters
from tests.trt.plugins.host import Host, Plugin, Tensor
from tests.trt.plugins.test_cubin_regions import create, tensors

pytestmark = pytest.mark.gpu
POISON = 0x7F
ROWS = 37


@pytest.fixture(params=adapters() or [None], ids=[version for version, _ in adapters()] or ["none"])
def region_host(request: pytest.FixtureRequest) -> Iterator[Host]:
    if request.param is None:
        pytest.skip("needs `make plugins`")
    version, library = request.param
    host = Host(BUILT / f"libhost_{version}.so", library, "StofFusedRegion")
    yield host
    host.close()


@pytest.fixture(scope="module")
def cubins(arch: int) -> dict[str, tuple[RowProgram, bytes]]:
    programs = {**named(768, "fp16"), "fp32": named(768, "fp32")["add_layer_norm_sum"]}
    compiled = compile_programs([(program, None, 2) for program in programs.values()], (arch,))
    return {name: (p, c.pack()) for (name, p), c in zip(programs.items(), compiled, strict=True)}


@dataclass
class Buffers:
    """A program's inputs and poisoned outputs on the device, every pointer `shift` bytes past its allocation."""

    program: RowProgram
    arrays: list[np.ndarray]
    shift: int
    given: list[cuda.Buffer]
    found: list[cuda.Buffer]

    @staticmethod
    def make(program: RowProgram, rows: int, shift: int = 0) -> Buffers:
        seed = secrets.randbits(32)
        print(f"seed {seed}")
        arrays = inputs(program, rows, np.random.default_rng(seed))
        given = []
        for array, wanted in zip(arrays, program.inputs, strict=True):
            raw = np.concatenate([np.zeros(shift, np.uint8), to_bytes(array, wanted.dtype).reshape(-1).view(np.uint8)])
            given.append(cuda.Buffer(raw.nbytes))
            given[-1].put(raw)
        sizes = [
            rows * t.dims[-1] * DTYPE_BYTES[out.dtype]
            for t, out in zip(outputs_of(program, rows), program.outputs, strict=True)
        ]
        buffers = Buffers(program, arrays, shift, given, [cuda.Buffer(size + shift + 64) for size in sizes])
        buffers.poison()
        return buffers

    def poison(self) -> None:
        for buffer in self.found:
            buffer.fill(POISON)

    def enqueue(self, plugin: Plugin, stream: int = 0) -> int:
        rows = self.arrays[0].shape[0]
        pointers = [[b.pointer + self.shift for b in buffers] for buffers in (self.given, self.found)]
        return plugin.run(tensors(self.program, (rows,)), *pointers, stream=stream)

    def assert_right(self) -> None:
        cuda.call("cudaDeviceSynchronize")
        rows, got = self.arrays[0].shape[0], []
        for buffer, out, tensor in zip(self.found, self.program.outputs, outputs_of(self.program, rows), strict=True):
            raw = np.empty(buffer.nbytes, np.uint8)
            buffer.get(raw)
            end = buffer.nbytes - 64
            assert (raw[: self.shift] == POISON).all() and (raw[end:] == POISON).all(), "wrote outside its output"
            got.append(from_bytes(raw[self.shift : end].copy(), out.dtype, tensor.dims))
        assert error_ratio(self.program, got, reference(self.program, self.arrays)) <= 1.0


def outputs_of(program: RowProgram, rows: int) -> list[Tensor]:
    return tensors(program, (rows,))[len(program.inputs) :]


def ready(host: Host, program: bytes) -> Plugin:
    """A plugin as a context has it."""
    plugin = create(host, program)
    assert plugin.initialize() == 0, host.log()
    return plugin.attach()


@pytest.mark.parametrize("shift", [0, 4])
def test_every_program_with_aligned_and_other_pointers(region_host: Host, cubins: dict[str, Any], shift: int) -> None:
    for program, packed in cubins.values():
        plugin, buffers = ready(region_host, packed), Buffers.make(program, ROWS, shift)
        assert buffers.enqueue(plugin) == 0, region_host.log()
        buffers.assert_right()


def test_a_graph_captures_a_launch(region_host: Host, cubins: dict[str, Any]) -> None:
    program, packed = cubins["add_layer_norm_sum"]
    plugin, buffers = ready(region_host, packed), Buffers.make(program, ROWS)
    stream = cuda.call("cudaStreamCreate")
    mode = cuda.runtime().cudaStreamCaptureMode.cudaStreamCaptureModeGlobal
    cuda.call("cudaStreamBeginCapture", stream, mode)
    assert buffers.enqueue(plugin, int(stream)) == 0, region_host.log()  # the first one of this plugin
    graph = cuda.call("cudaStreamEndCapture", stream)
    executable = cuda.call("cudaGraphInstantiate", graph, 0)
    for _ in range(3):
        buffers.poison()
        cuda.call("cudaDeviceSynchronize")
        cuda.call("cudaGraphLaunch", executable, stream)
        buffers.assert_right()
    cuda.call("cudaGraphExecDestroy", executable)
    cuda.call("cudaGraphDestroy", graph)
    cuda.call("cudaStreamDestroy", stream)


def test_copies_outlive_their_original_and_threads_share_one(region_host: Host, cubins: dict[str, Any]) -> None:
    program, packed = cubins["add_rms_norm_sum"]
    original = create(region_host, packed)
    assert original.initialize() == 0
    plugin = original.attach()
    region_host._alive.remove(original.pointer.value or 0)
    region_host.c.host_destroy(original.pointer)
    buffers = [Buffers.make(program, rows) for rows in (1, 100, 1000, 3000)]
    failed: list[int] = []

    def work(mine: Buffers) -> None:
        cuda.call("cudaSetDevice", 0)
        failed.extend(status for status in (mine.enqueue(plugin) for _ in range(50)) if status)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, region_host.log()
    for mine in buffers:
        mine.assert_right()


def test_modules_are_given_back(region_host: Host, cubins: dict[str, Any]) -> None:
    held = []
    for _ in range(8):
        for program, packed in cubins.values():
            plugin = ready(region_host, packed)
            assert Buffers.make(program, 3).enqueue(plugin) == 0
        cuda.call("cudaDeviceSynchronize")
        region_host.close()
        held.append(device_memory())
    assert held[-1] <= held[1], held


@pytest.mark.parametrize("change", ["name", "missing", "more", "other"])
def test_kernels_that_are_not_what_the_program_says_are_refused(
    region_host: Host, cubins: dict[str, Any], arch: int, change: str
) -> None:
    """The driver would look for another kernel, or read parameters that no one gives."""
    program, _ = cubins["layer_norm"]
    good = compile_programs([(program, None, 2)], (arch,))[0]
    launch = good.launches[0]
    words = "has other parameters than the program says"
    if change == "name":
        named_otherwise = tuple(tuple(replace(image, name="another") for image in images) for images in good.kernels)
        changed, words = replace(good, kernels=named_otherwise), "kernel another can not be used"
    else:
        args = {
            "missing": launch.args[:-1],
            "more": (*launch.args, launch.args[0]),
            "other": (launch.args[-1], *launch.args[1:]),
        }[change]
        changed = replace(good, launches=(replace(launch, args=args),))
    plugin = create(region_host, changed)
    region_host.log()
    assert Buffers.make(program, 3).enqueue(plugin) != 0
    assert words in region_host.log()
