"""StofFusedRegion's template `cubin` in both adapters, driven as TensorRT drives them. No GPU."""

from __future__ import annotations

import base64
import dataclasses
import random
import secrets
import struct
from typing import Any

import pytest
from stof_onnx.kernels.cubin_program import CubinProgram, KernelImage
from stof_onnx.kernels.gemm_pair import GemmPair
from stof_onnx.kernels.gemm_pair import configurations as pair_configurations
from stof_onnx.kernels.triton_rows import RowProgram
from stof_onnx.kernels.triton_rows.compile import assemble
from stof_onnx.kernels.triton_rows.configs import configurations

from tests.kernels.triton_rows.programs import mixed, named
from tests.trt.plugins.host import (
    BF16,
    F16,
    F32,
    FIELD_CHAR,
    FIELD_I32,
    I32,
    LINEAR,
    Host,
    Plugin,
    Tensor,
    assert_refused,
)
from tests.trt.plugins.test_cubin_program import elf, forged, sample

TYPES = {"fp16": F16, "bf16": BF16, "fp32": F32}
PROGRAMS = {**named(768, "fp16"), "bf16": named(100, "bf16")["add_rms_norm_sum"], "mixed": mixed(64, "fp16")}


def packed(program: RowProgram, rank: int = 2) -> CubinProgram:
    """A program with the frame of a cubin in place of code."""
    image = KernelImage(90, f"k{program.key}", 128, 0, 2, elf())  # the code is not, the name is its own
    return assemble(program, configurations(program)[0], rank, [image, image])


def tensors(program: RowProgram, leading: tuple[int, ...]) -> list[Tensor]:
    """The node's inputs, then its outputs."""
    kinds = program.kinds
    found = []
    for kind, dtype in [(g.kind, g.dtype) for g in program.inputs] + [
        (kinds[o.value], o.dtype) for o in program.outputs
    ]:
        dims = (*(leading if kind.per_row else ()), program.cols if kind.per_col else 1)
        found.append(Tensor(dims, TYPES[dtype]))
    return found


def attributes(program: CubinProgram | bytes) -> dict[str, Any]:
    data = program if isinstance(program, bytes) else program.pack()
    return {"template": "cubin", "program": base64.b64encode(data).decode(), "plugin_version": "1"}


def create(host: Host, program: CubinProgram | bytes) -> Plugin:
    plugin = host.create(attributes(program))
    assert plugin, host.log()
    return plugin


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_planned(region_host: Host, name: str, rank: int) -> None:
    program = PROGRAMS[name]
    leading = (5, 40)[3 - rank :]
    io, outputs = tensors(program, leading), len(program.outputs)
    inputs, wanted = io[:-outputs], io[-outputs:]
    plugin = create(region_host, packed(program, rank))
    assert plugin.identity() == f"StofFusedRegion 1 stof {outputs}"
    assert plugin.output_shapes(inputs, outputs) == [t.dims for t in wanted]
    types = [t.type for t in inputs]
    if region_host.v3 or BF16 not in types:
        assert plugin.output_types(types, outputs) == [t.type for t in wanted]
    assert plugin.configure(io, outputs) == 0
    dynamic = [dataclasses.replace(t, dims=tuple(-d for d in t.dims)) for t in inputs]
    shapes = plugin.output_shapes(dynamic, outputs)
    assert shapes and [shape[:-1] for shape in shapes] == [tuple(-d for d in leading)] * outputs
    assert [shape[-1] for shape in shapes] == [t.dims[-1] for t in wanted]  # the columns stay known
    assert region_host.log() == ""


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_pair_of_gemms_is_planned(region_host: Host, dtype: str, rank: int) -> None:
    """Weights are inputs of fixed sizes, the residual has the rows of x, and nothing else fits."""
    pair = GemmPair(768, 64, 200, dtype, "relu", "none", True, True, True)
    image = KernelImage(90, "pair", 128, 0, 2, elf())
    program = assemble(pair, pair_configurations(pair)[0], rank, [image, image])
    leading, kind = (5, 40)[3 - rank :], TYPES[dtype]
    named_dims = {"x": (*leading, 768), "residual": (*leading, 200)}
    inputs = [Tensor(named_dims.get(name, sizes), kind) for name, sizes in pair.inputs.items()]
    plugin = create(region_host, program)
    assert plugin.output_shapes(inputs, 1) == [(*leading, 200)]
    assert plugin.configure([*inputs, Tensor((*leading, 200), kind)], 1) == 0
    assert region_host.log() == ""
    restored = region_host.deserialize(plugin.serialize())
    assert restored and restored.configure([*inputs, Tensor((*leading, 200), kind)], 1) == 0
    for place, dims, words in (
        (0, (*leading, 776), "of input 0 is 776 instead of 768"),
        (1, (768, 72), "axis 1 of input 1 is 72 instead of 64"),
        (2, (72, 200), "axis 0 of input 2 is 72 instead of 64"),
        (5, (*leading[:-1], 41, 200), "of input 5 is 41 instead of 40"),
    ):
        wrong = [*inputs, Tensor((*leading, 200), kind)]
        wrong[place] = Tensor(dims, kind)
        assert_refused(create(region_host, program), wrong, words, outputs=1)


def test_outputs_are_declared_as_inputs_of_their_type_are(region_host: Host) -> None:
    """A float32 network whose tensors run in fp16."""
    plugin = create(region_host, packed(PROGRAMS["add_layer_norm_sum"]))
    assert plugin.output_types([F32] * 4, 2) == [F32, F32] and plugin.output_types([F16] * 4, 2) == [F16, F16]
    assert create(region_host, packed(PROGRAMS["mixed"])).output_types([F16, F32, F16], 4) == [F16, F32, F16, F16]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plugin_survives_its_engine(region_host: Host, name: str) -> None:
    program = PROGRAMS[name]
    cubin = packed(program)
    plugin = create(region_host, cubin)
    stored = plugin.serialize()
    assert cubin.pack() in stored
    restored = region_host.deserialize(stored)
    assert restored, region_host.log()
    for copy in (restored, plugin.clone(), restored.clone()):
        assert copy.serialize() == stored and copy.timing_key() == plugin.timing_key()
        assert copy.configure(tensors(program, (40,)), len(program.outputs)) == 0


def test_different_programs_have_different_timing_keys(region_host: Host) -> None:
    plugins = [create(region_host, packed(program)) for program in PROGRAMS.values()]
    keys = {plugin.timing_key() for plugin in plugins}
    assert len(keys) == len(PROGRAMS) or not region_host.v3


def test_types_and_ranks_of_all_positions(region_host: Host) -> None:
    program = PROGRAMS["mixed"]
    plugin, io = create(region_host, packed(program)), tensors(program, (40,))
    outputs = len(program.outputs)
    for pos, tensor in enumerate(io):
        for kind in (F32, F16, I32, BF16):
            changed = [*io[:pos], dataclasses.replace(tensor, type=kind), *io[pos + 1 :]]
            assert plugin.supports(pos, changed, outputs) == (kind == tensor.type), (pos, kind)
        for changed_tensor in (
            dataclasses.replace(tensor, dims=(*tensor.dims, 1)),
            dataclasses.replace(tensor, format=LINEAR + 1),
        ):
            assert not plugin.supports(pos, [*io[:pos], changed_tensor, *io[pos + 1 :]], outputs)
    assert not plugin.supports(-1, io, outputs) and not plugin.supports(len(io), io, outputs)
    assert not plugin.supports(0, io, outputs - 1)


@pytest.mark.parametrize(
    ("pos", "dims", "words"),
    [
        (0, (40, 700), "axis 1 of input 0 is 700 instead of 768"),
        (0, (2, 20, 768), "input 0 has rank 3 instead of 2"),
        (1, (41, 768), "axis 0 of input 1 is 41 instead of 40"),
        (2, (769,), "axis 0 of input 2 is 769 instead of 768"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(region_host: Host, pos: int, dims: tuple[int, ...], words: str) -> None:
    program = PROGRAMS["add_layer_norm_sum"]
    plugin, io = create(region_host, packed(program)), tensors(program, (40,))
    io[pos] = dataclasses.replace(io[pos], dims=dims)
    assert_refused(plugin, io, words, outputs=2)


def test_rows_beyond_32_bits_are_refused(region_host: Host) -> None:
    program = PROGRAMS["layer_norm"]
    for rows in ((1 << 31) - 1, 1 << 32):
        assert_refused(create(region_host, packed(program)), tensors(program, (rows,)), "too large", outputs=1)
    assert_refused(
        create(region_host, packed(program, 3)), tensors(program, (1 << 31, 1 << 31)), "too large", outputs=1
    )
    wide = tensors(program, (1 << 31, 1 << 31))
    wide[0] = dataclasses.replace(wide[0], dims=(1 << 40, 1 << 40, 768))
    assert_refused(create(region_host, packed(program, 3)), wide, "overflow", outputs=1)


def test_without_a_gpu_nothing_starts(region_host: Host) -> None:
    program = PROGRAMS["layer_norm"]
    plugin = create(region_host, packed(program))
    shapes, enqueued = plugin.enqueue(tensors(program, (40,)))
    assert enqueued != 0 and shapes == 0 and "CUDA" in region_host.log()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"program": None}, "needs the attribute 'program'"),
        ({"program": ""}, "'program' is empty"),
        ({"program": "AAA"}, "not base64"),
        ({"program": "AAA*"}, "not base64"),
        ({"program": (FIELD_I32, bytes(4), 1)}, "wrong type"),
        ({"program": base64.b64encode(bytes(64)).decode()}, "does not start with its mark"),
        ({"activation": "relu"}, "no attributes but 'program'"),
        ({"has_bias": 1}, "no attributes but 'program'"),
    ],
)
def test_attributes_that_make_no_sense_are_refused(region_host: Host, change: dict[str, Any], words: str) -> None:
    given = {**attributes(packed(PROGRAMS["layer_norm"])), **change}
    assert region_host.create({name: value for name, value in given.items() if value is not None}) is None
    assert words in region_host.log()


def test_a_text_without_its_end_is_read_to_its_length(region_host: Host) -> None:
    text = attributes(packed(PROGRAMS["layer_norm"]))["program"].encode()
    for data in (text, text + b"\0"):
        given = {"template": "cubin", "program": (FIELD_CHAR, data, len(data))}
        assert region_host.create(given), region_host.log()


def test_forged_programs_do_no_harm(region_host: Host) -> None:
    """Words changed under right checksums: refused, or a plugin that plans or refuses shapes."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    good = sample().pack()
    io = [Tensor((2, 3, 768)), Tensor((768,), BF16), Tensor((), I32), Tensor((2, 4), F32), Tensor((6, 768))]
    assert create(region_host, good).configure(io, 2) == 24
    refused_count = 0
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 2)):
            word = rng.choice((0, 1, 2, 7, 16, 255, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32), rng.getrandbits(5)))
            struct.pack_into("<I", data, 4 * rng.randrange(4, len(data) // 4), word)
        plugin = region_host.create(attributes(forged(bytes(data))))
        if plugin is None:
            refused_count += 1
            assert region_host.log()
            continue
        outputs = int(plugin.identity().rsplit(" ", 1)[1])
        if outputs == 2:
            plugin.output_shapes(io[:3], 2)
            plugin.configure(io, 2)
            plugin.enqueue(io, 2)
        assert region_host.deserialize(plugin.serialize())
    assert 500 < refused_count < 2000
