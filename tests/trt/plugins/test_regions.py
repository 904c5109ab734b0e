"""StofFusedRegion's GEMM templates in both adapters, driven as TensorRT drives them, and their bytes. No GPU."""

from __future__ import annotations

import dataclasses
import math
import random
import secrets
import struct
from dataclasses import dataclass
from typing import Any

import pytest

from tests.trt.plugins.host import (
    BF16,
    CHW2,
    F16,
    F32,
    FIELD_CHAR,
    FIELD_F32,
    FIELD_I32,
    FIELD_I64,
    I8,
    I32,
    LINEAR,
    Host,
    Plugin,
    Tensor,
    assert_refused,
)


@dataclass(frozen=True)
class Region:
    """A node of a GEMM template: its attributes, inputs and output."""

    template: str = "gemm_epilogue"
    rows: tuple[int, ...] = (2, 50)
    n: int = 64
    k: int = 72
    activation: str = "none"
    bias: bool = False
    residual: bool = False
    config: str = "auto"
    dtype: int = F16
    rotated: int = 0  # columns, in heads of 16
    norm: dict[str, Any] | None = None  # attributes of gemm_norm

    def attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {"template": self.template, "plugin_version": "1", "plugin_namespace": "stof"}
        if self.activation != "none":
            attributes["activation"] = self.activation
        if self.bias:
            attributes["has_bias"] = 1
        if self.residual:
            attributes["has_residual"] = 1
        if self.config != "auto":
            attributes["config"] = self.config
        if self.rotated:
            attributes |= {"rotated_columns": self.rotated, "head_dim": 16}
        attributes |= self.norm or {}
        return attributes

    def inputs(self) -> list[Tensor]:
        factors = 2 if self.template == "gated_mlp" else 1
        dims = [(*self.rows, self.k), *[(self.k, self.n)] * factors, *[(self.n,)] * (factors * self.bias)]
        dims += [(*self.rows, self.n)] * self.residual
        dims += [(self.n,) for name in ("has_scale", "has_shift") if (self.norm or {}).get(name)]
        rotation = [Tensor((self.rows[-1], 16), F32)] if self.rotated else []
        return [Tensor(d, self.dtype) for d in dims] + rotation

    @property
    def outputs(self) -> int:
        return 2 if (self.norm or {}).get("keep_sum") else 1

    def output(self) -> Tensor:
        return Tensor((*self.rows, self.n), self.dtype)

    def tensors(self) -> list[Tensor]:
        return [*self.inputs(), *[self.output()] * self.outputs]


REGIONS = [
    Region(),
    Region(bias=True, activation="gelu_erf"),
    Region(bias=True, residual=True, rows=(100,)),
    Region(residual=True, activation="relu", dtype=BF16),
    Region(bias=True, activation="gelu_tanh", rows=(1, 1)),
    Region(bias=True, rotated=48),
    Region(rotated=64, rows=(100,), dtype=BF16),
    Region("gated_mlp", activation="silu"),
    Region("gated_mlp", bias=True, activation="gelu_tanh", rows=(7,), dtype=BF16),
]

NORM = {"kind": "rms_norm", "epsilon": 1e-6, "has_scale": 1}
REGIONS += [
    Region("gemm_norm", norm={"epsilon": 1e-5}),
    Region("gemm_norm", bias=True, residual=True, norm={"epsilon": 1e-12, "has_scale": 1, "has_shift": 1}),
    Region("gemm_norm", residual=True, rows=(100,), dtype=BF16, norm=NORM | {"keep_sum": 1}),
]


def create(host: Host, region: Region, **attributes: Any) -> Plugin:
    plugin = host.create(region.attributes() | attributes)
    assert plugin, host.log()
    return plugin


def test_creator_declares_every_attribute(region_host: Host) -> None:
    name, version, namespace, *declared = region_host.describe()
    assert (name, version, namespace) == ("StofFusedRegion", "1", "stof")
    kinds = {field.split(":")[0]: int(field.split(":")[1]) for field in declared}
    texts = dict.fromkeys(("template", "activation", "config", "program", "kind"), FIELD_CHAR)
    flags = ("has_bias", "has_residual", "rotated_columns", "head_dim", "has_scale", "has_shift", "keep_sum")
    assert kinds == texts | dict.fromkeys(flags, FIELD_I32) | {"epsilon": FIELD_F32}


@pytest.mark.parametrize("region", REGIONS, ids=str)
def test_every_kind_of_region_is_planned(region_host: Host, region: Region) -> None:
    plugin = create(region_host, region)
    assert plugin.identity() == f"StofFusedRegion 1 stof {region.outputs}"
    count = region.outputs
    assert plugin.output_shapes(region.inputs(), count) == [region.output().dims] * count
    assert plugin.output_types([t.type for t in region.inputs()], count) == [region.dtype] * count
    assert plugin.configure(region.tensors(), count) == 0
    dynamic = [dataclasses.replace(t, dims=tuple(-d for d in t.dims)) for t in region.inputs()]
    assert plugin.output_shapes(dynamic, count) == [tuple(-d for d in region.output().dims)] * count
    assert region_host.log() == ""


@pytest.mark.parametrize("region", REGIONS, ids=str)
def test_formats_of_all_positions(region_host: Host, region: Region) -> None:
    plugin, tensors, count = create(region_host, region), region.tensors(), region.outputs
    for first in (F16, BF16):
        for pos in range(len(tensors)):
            for kind in (F32, F16, I8, I32, BF16):
                for layout in (LINEAR, CHW2):
                    io = [dataclasses.replace(t, type=first) for t in tensors]
                    io[pos] = dataclasses.replace(io[pos], type=kind, format=layout)
                    rotation = region.rotated and pos == len(tensors) - 2
                    wanted = kind in (F16, BF16) if pos == 0 else kind == (F32 if rotation else first)
                    assert plugin.supports(pos, io, count) == (wanted and layout == LINEAR), (pos, kind, layout, first)
    for pos in (-1, len(tensors)):
        assert not plugin.supports(pos, tensors, count)
    assert not plugin.supports(0, [*tensors, tensors[-1]], outputs=count + 1)
    assert not plugin.supports(0, tensors[:-1], count)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"template": None}, "'template' is missing"),
        ({"template": "gemm"}, "'template' is 'gemm'"),
        ({"template": (FIELD_I32, bytes(4), 1)}, "'template' has the wrong type"),
        ({"activation": "gelu"}, "'activation' is 'gelu'"),
        ({"activation": ""}, "'activation' is empty"),
        ({"has_bias": 2}, "'has_bias' is 2"),
        ({"has_bias": -1}, "'has_bias' is -1"),
        ({"has_bias": (FIELD_I32, bytes(8), 2)}, "2 values"),
        ({"has_residual": (FIELD_F32, bytes(4), 1)}, "'has_residual' has the wrong type"),
        ({"config": "fastest"}, "no such variant"),
        ({"config": "x" * 32}, "'config' has 32 characters"),
        ({"config": "a b"}, "other characters"),
        ({"program": "AAAA"}, "only template 'cubin'"),
        ({"program": "AAA"}, "not base64"),
        ({"program": "AA=A"}, "not base64"),
        ({"program": "A\tAA"}, "not base64"),
        ({"template": "gated_mlp", "has_residual": 1}, "no residual"),
        ({"template": "gated_mlp", "config": "cublaslt"}, "for template 'gemm_epilogue' only"),
        ({"rotated_columns": 16}, "no whole heads"),
        ({"head_dim": 16}, "no whole heads"),
        ({"rotated_columns": 24, "head_dim": 12}, "no whole heads"),
        ({"rotated_columns": 40, "head_dim": 16}, "no whole heads"),
        ({"rotated_columns": -16, "head_dim": -16}, "no whole heads"),
        ({"rotated_columns": 16, "head_dim": 16, "has_residual": 1}, "without activation and residual"),
        ({"rotated_columns": 16, "head_dim": 16, "activation": "silu"}, "without activation and residual"),
        ({"template": "gated_mlp", "rotated_columns": 16, "head_dim": 16}, "'gemm_epilogue' without activation"),
        ({"template": "gemm_norm"}, "'epsilon' is missing"),
        ({"template": "gemm_norm", "epsilon": -1e-5}, "'epsilon' is negative"),
        ({"template": "gemm_norm", "epsilon": math.nan}, "'epsilon' is negative or not a finite"),
        ({"template": "gemm_norm", "epsilon": 1e-5, "kind": "norm"}, "'kind' is 'norm'"),
        ({"template": "gemm_norm", "epsilon": 1e-5, "activation": "relu"}, "no activation"),
        ({"template": "gemm_norm", "epsilon": 1e-5, "keep_sum": 2}, "'keep_sum' is 2"),
        ({"keep_sum": 1}, "only template 'gemm_norm'"),
        ({"epsilon": 1e-5}, "only template 'gemm_norm'"),
        ({"template": "cubin", "program": "AAAA", "has_scale": 1}, "no attributes but 'program'"),
        ({"template": "cubin"}, "needs the attribute 'program'"),
        ({"template": "cubin", "program": "AAAA", "has_bias": 1}, "no attributes but 'program'"),
    ],
    ids=str,
)
def test_bad_attributes_are_refused_by_name(region_host: Host, attributes: dict[str, Any], words: str) -> None:
    given = {k: v for k, v in (Region().attributes() | attributes).items() if v is not None}
    assert region_host.create(given) is None
    assert words in region_host.log()
    assert region_host.create(Region().attributes()) is not None


def test_attributes_are_read_whatever_their_order_and_width(region_host: Host) -> None:
    attributes = Region(bias=True, residual=True, activation="relu").attributes() | {"config": "auto"}
    plugin = region_host.create(attributes)
    assert plugin
    reverse = region_host.create(dict(reversed(attributes.items())))
    assert reverse and reverse.serialize() == plugin.serialize()
    other: dict[str, Any] = {
        k: (FIELD_CHAR, v.encode() + b"\0", len(v) + 1) for k, v in attributes.items() if isinstance(v, str)
    }
    if region_host.v3:
        other |= {k: (FIELD_I64, v.to_bytes(8, "little"), 1) for k, v in attributes.items() if isinstance(v, int)}
    again = region_host.create(attributes | other)
    assert again and again.serialize() == plugin.serialize()


@pytest.mark.parametrize(
    ("region", "index", "dims", "words"),
    [
        (Region(), 0, (72,), "x has rank 1"),
        (Region(), 0, (2, 2, 25, 72), "x has rank 4"),
        (Region(), 0, (2, 0, 72), "not positive"),
        (Region(), 0, (1 << 16, 1 << 16, 72), "too large"),
        (Region(), 0, (2, 50, 80), "weights are not [80, N]"),
        (Region(), 1, (72, 64, 1), "weights are not"),
        (Region("gated_mlp"), 2, (72, 56), "second weights are not [72, 64]"),
        (Region(bias=True), 2, (72,), "bias is not [64]"),
        (Region(bias=True), 2, (1, 64), "bias is not [64]"),
        (Region("gated_mlp", bias=True), 4, (56,), "bias is not [64]"),
        (Region(residual=True), 2, (2, 49, 64), "residual does not have"),
        (Region(residual=True), 2, (100, 64), "residual does not have"),
        (Region(rotated=16), 2, (50, 32), "rotation is not [S, 16]"),
        (Region(rotated=16), 2, (50, 8, 2), "rotation is not [S, 16]"),
        (Region(rotated=16), 2, (25, 16), "other positions than the rotation's 25"),
        (Region(rotated=16, rows=(100,)), 2, (64, 16), "other positions than the rotation's 64"),
        (Region(rotated=80, n=64), 1, (72, 64), "no whole heads of the output"),
        (Region("gemm_norm", norm=NORM), 2, (72,), "scale or shift is not [64]"),
        (Region("gemm_norm", residual=True, norm=NORM), 2, (2, 50, 72), "residual does not have"),
        (Region("gemm_norm", n=1544, norm={"epsilon": 1e-5}), 0, (2, 50, 72), "rows too long"),
        (Region(k=68), 0, (2, 50, 68), "multiple of 8"),
        (Region(n=60), 1, (72, 60), "multiple of 8"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(
    region_host: Host, region: Region, index: int, dims: tuple[int, ...], words: str
) -> None:
    plugin, tensors = create(region_host, region), region.tensors()
    tensors[index] = dataclasses.replace(tensors[index], dims=dims)
    assert_refused(plugin, tensors, words)


def test_cublaslt_runs_or_is_refused_by_name(region_host: Host) -> None:
    """Whether the library is there is asked where the engine is built and where it is loaded."""
    region = Region(bias=True, activation="gelu_tanh", config="cublaslt")
    plugin = create(region_host, region)
    if plugin.configure(region.tensors()) == 0:
        refused = Region(activation="silu", config="cublaslt")
        assert_refused(create(region_host, refused), refused.tensors(), "ReLU and the tanh form")
    else:
        assert "config 'cublaslt' can not run here: cuBLASLt" in region_host.log()
        assert region_host.deserialize(plugin.serialize()), "reading an engine's bytes asks for no library"


def test_another_number_or_rank_of_inputs_is_refused(region_host: Host) -> None:
    plugin = create(region_host, Region(bias=True))
    assert plugin.output_shape([]) is None
    assert plugin.output_shape(Region().inputs()) is None
    assert plugin.output_shape([Tensor((72,))] * 3) is None
    assert_refused(plugin, Region().tensors(), "2 inputs, 3 expected") if region_host.v3 else None


@pytest.mark.parametrize("region", REGIONS, ids=str)
def test_a_region_survives_its_engine(region_host: Host, region: Region) -> None:
    plugin = create(region_host, region)
    stored = plugin.serialize()
    restored = region_host.deserialize(stored)
    assert restored, region_host.log()
    for copy in (restored, plugin.clone(), restored.clone(), restored.attach()):
        assert copy.serialize() == stored
        assert copy.identity() == plugin.identity()
        assert copy.output_shapes(region.inputs(), region.outputs) == [region.output().dims] * region.outputs
        assert copy.configure(region.tensors(), region.outputs) == 0


def test_copies_outlive_their_original(region_host: Host) -> None:
    plugin = create(region_host, Region(bias=True))
    stored, copy, context = plugin.serialize(), plugin.clone(), plugin.attach()
    region_host._alive.remove(plugin.pointer.value)
    region_host.c.host_destroy(plugin.pointer)
    assert copy.serialize() == context.serialize() == stored


def test_truncated_extended_and_flipped_bytes_are_refused(region_host: Host) -> None:
    stored = create(region_host, Region("gated_mlp", bias=True, activation="silu")).serialize()
    for length in range(len(stored)):
        assert region_host.deserialize(stored[:length]) is None, length
        assert f"holds {length} bytes" in region_host.log()
    assert region_host.deserialize(stored + b"\0") is None
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        assert region_host.deserialize(bytes(damaged)) is None, bit
        assert region_host.log()
    for length in (0, 1, 16, 68, 72, 4000):
        assert region_host.deserialize(secrets.token_bytes(length)) is None


def forged(body: bytes) -> bytes:
    """`body` under a header that fits it: magic, format, length, FNV-1a, as region_config.cpp has them."""
    total = 2166136261
    for byte in body:
        total = (total ^ byte) * 16777619 & 0xFFFFFFFF
    return struct.pack("<4sIII", b"STRG", 2, 16 + len(body), total) + body


def test_forged_bytes_never_pass_a_bad_word(region_host: Host) -> None:
    """Words are checked for themselves: what is accepted describes itself and plans or refuses, without a crash."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    region = Region(bias=True)
    stored = create(region_host, region).serialize()
    assert forged(stored[16:]) == stored
    refused = 0
    for _ in range(3000):
        words = list(struct.unpack("<13I", stored[16:68]))
        for _ in range(rng.randint(1, 3)):
            values = (0, 1, 2, 3, 4, 5, 7, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, rng.getrandbits(32))
            words[rng.randrange(13)] = rng.choice(values)
        data = forged(struct.pack("<13I", *words) + stored[68:])
        restored = region_host.deserialize(data)
        refused += restored is None
        if restored:
            assert restored.serialize() == data
            restored.output_shape(region.inputs())
            restored.configure(region.tensors())
        else:
            assert region_host.log()
    assert 500 < refused < 3000


def test_timing_keys_tell_regions_apart(region_host: Host) -> None:
    if not region_host.v3:
        pytest.skip("IPluginV2 has none")
    plugins = [create(region_host, region) for region in REGIONS]
    assert len({p.timing_key() for p in plugins}) == len({p.serialize() for p in plugins})
