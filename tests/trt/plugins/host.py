"""ctypes face of host.cpp, and small StofAttention nodes that a plugin library is driven with."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

F32, F16, I8, I32, BOOL, BF16 = 0, 1, 2, 3, 4, 7  # nvinfer1::DataType
LINEAR, CHW2 = 0, 1  # nvinfer1::TensorFormat
FIELD_F32, FIELD_I32, FIELD_CHAR, FIELD_I64 = 1, 5, 6, 10  # nvinfer1::PluginFieldType
CONFIG_BYTES = 16 + 4 * 27
REFUSED_WORKSPACE = 1 << 40  # more than any GPU has


class Field(ct.Structure):
    _fields_ = [("name", ct.c_char_p), ("type", ct.c_int32), ("data", ct.c_void_p), ("length", ct.c_int32)]


class HostTensor(ct.Structure):
    _fields_ = [
        ("type", ct.c_int32),
        ("format", ct.c_int32),
        ("rank", ct.c_int32),
        ("dims", ct.c_int64 * 8),
        ("dynamic", ct.c_int32 * 8),
    ]


@dataclass(frozen=True)
class Tensor:
    """One input or output; a negative size is known at run time only (its value is the absolute one)."""

    dims: tuple[int, ...]
    type: int = F16
    format: int = LINEAR


def _tensors(tensors: Sequence[Tensor]) -> ct.Array[HostTensor]:
    array = (HostTensor * len(tensors))()
    for target, t in zip(array, tensors, strict=True):
        target.type, target.format, target.rank = t.type, t.format, len(t.dims)
        for i, size in enumerate(t.dims):
            target.dims[i], target.dynamic[i] = abs(size), size < 0
    return array


def fields(attributes: Mapping[str, Any]) -> list[tuple[str, int, bytes, int]]:
    """Attributes as the ONNX parser hands them over: name, type, bytes, number of values."""
    result = []
    for name, value in attributes.items():
        if isinstance(value, tuple):
            result.append((name, *value))
        elif isinstance(value, str):
            result.append((name, FIELD_CHAR, value.encode(), len(value)))
        elif isinstance(value, float):
            result.append((name, FIELD_F32, bytes(ct.c_float(value)), 1))
        else:
            result.append((name, FIELD_I32, bytes(ct.c_int32(value)), 1))
    return result


class Host:
    """A loaded plugin library and one of its creators. Plugins it makes live until `close`."""

    def __init__(self, driver: Path, library: Path, name: str = "StofAttention") -> None:
        c = self.c = ct.CDLL(str(driver))
        pointers = ("host_load", "host_create", "host_deserialize", "host_clone", "host_attach")
        for function in pointers:
            getattr(c, function).restype = ct.c_void_p
        for function in ("host_log", "host_describe", "host_identity", "host_timing_key"):
            getattr(c, function).restype = ct.c_char_p
        for function in ("host_serialize", "host_configure"):
            getattr(c, function).restype = ct.c_int64
        self.v3, self.library = driver.name == "libhost_v3.so", library
        self.creator = ct.c_void_p(c.host_load(str(library).encode(), name.encode()))
        assert self.creator, self.log()
        self._alive: list[int] = []

    def log(self) -> str:
        return str(self.c.host_log().decode())

    def describe(self) -> list[str]:
        return str(self.c.host_describe(self.creator).decode()).split(" ")

    def create(self, attributes: Mapping[str, Any]) -> Plugin | None:
        self.log()
        given = fields(attributes)
        array = (Field * len(given))()
        buffers = [ct.create_string_buffer(data, len(data)) if data else None for _, _, data, _ in given]
        for target, (name, kind, _, length), buffer in zip(array, given, buffers, strict=True):
            target.name, target.type, target.length = name.encode(), kind, length
            target.data = ct.cast(buffer, ct.c_void_p) if buffer else None
        return self._keep(self.c.host_create(self.creator, array, len(given)))

    def deserialize(self, data: bytes) -> Plugin | None:
        self.log()
        # The exact size: a read past the end would meet the guard bytes of a sanitizer, not more data.
        buffer = (ct.c_char * max(len(data), 1)).from_buffer_copy(data or b"\0")
        return self._keep(self.c.host_deserialize(self.creator, buffer, ct.c_int64(len(data))))

    def _keep(self, pointer: int | None) -> Plugin | None:
        if not pointer:
            return None
        self._alive.append(pointer)
        return Plugin(self, ct.c_void_p(pointer))

    def close(self) -> None:
        while self._alive:
            self.c.host_destroy(ct.c_void_p(self._alive.pop()))


class Plugin:
    """One plugin, with what TensorRT calls on it."""

    def __init__(self, host: Host, pointer: ct.c_void_p) -> None:
        self.host, self.pointer = host, pointer

    def identity(self) -> str:
        return str(self.host.c.host_identity(self.pointer).decode())

    def timing_key(self) -> str:
        return str(self.host.c.host_timing_key(self.pointer).decode())

    def serialize(self) -> bytes:
        size = 1 << 20
        room = ct.create_string_buffer(size)
        length = self.host.c.host_serialize(self.pointer, room, ct.c_int64(size))
        assert 0 <= length <= size
        return room.raw[:length]

    def clone(self) -> Plugin:
        copy = self.host._keep(self.host.c.host_clone(self.pointer))
        assert copy
        return copy

    def attach(self) -> Plugin:
        copy = self.host._keep(self.host.c.host_attach(self.pointer))
        assert copy
        return copy

    def output_shape(self, inputs: Sequence[Tensor]) -> tuple[int, ...] | None:
        """Of the only output. Negative sizes: known at run time only. None: refused."""
        shapes = self.output_shapes(inputs, 1)
        return shapes and shapes[0]

    def output_shapes(self, inputs: Sequence[Tensor], outputs: int) -> list[tuple[int, ...]] | None:
        """`output_shape` of several outputs."""
        out = (HostTensor * outputs)()
        if self.host.c.host_output_shapes(self.pointer, _tensors(inputs), len(inputs), out, outputs) < 0:
            return None
        return [tuple(-t.dims[i] if t.dynamic[i] else t.dims[i] for i in range(t.rank)) for t in out]

    def output_type(self, types: Sequence[int]) -> int:
        return self.output_types(types, 1)[0]

    def output_types(self, types: Sequence[int], outputs: int) -> list[int]:
        """-1: refused."""
        out = (ct.c_int32 * outputs)()
        given = (ct.c_int32 * len(types))(*types)
        status = self.host.c.host_output_types(self.pointer, given, len(types), out, outputs)
        return [-1] * outputs if status < 0 else list(out)

    def supports(self, pos: int, tensors: Sequence[Tensor], outputs: int = 1) -> bool:
        array = _tensors(tensors)
        return bool(self.host.c.host_supports(self.pointer, pos, array, len(tensors) - outputs, outputs))

    def configure(self, tensors: Sequence[Tensor], outputs: int = 1) -> int:
        """Bytes of workspace for inputs and outputs at their largest; -1: refused."""
        array = _tensors(tensors)
        return int(self.host.c.host_configure(self.pointer, array, len(tensors) - outputs, outputs))

    def enqueue(self, tensors: Sequence[Tensor], outputs: int = 1) -> tuple[int, int]:
        """Outcomes of onShapeChange and enqueue, for what has to be refused: the pointers lead nowhere."""
        shapes, status = ct.c_int32(), ct.c_int32()
        inputs = len(tensors) - outputs
        self.host.c.host_enqueue(self.pointer, _tensors(tensors), inputs, outputs, ct.byref(shapes), ct.byref(status))
        return shapes.value, status.value

    def initialize(self) -> int:
        """0: accepted (V3 has nothing to ask)."""
        return int(self.host.c.host_initialize(self.pointer))

    def run(
        self,
        tensors: Sequence[Tensor],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int = 0,
        stream: int = 0,
    ) -> int:
        """Enqueues on a GPU: device pointers, a stream's handle. 0: done."""
        given, found = (ct.c_void_p * len(inputs))(*inputs), (ct.c_void_p * len(outputs))(*outputs)
        space, on = ct.c_void_p(workspace), ct.c_void_p(stream)
        counts = (len(inputs), len(outputs))
        return int(self.host.c.host_run(self.pointer, _tensors(tensors), *counts, given, found, space, on))


@dataclass(frozen=True)
class Node:
    """A StofAttention node: its attributes, inputs and output. `layout` is one name for all, or four, or "packed"."""

    layout: str = "BHSD"
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    seq_q: int = 100
    seq_kv: int = 130
    dim: int = 64
    v_dim: int = 48
    rank: int = 4  # of BSHD tensors
    dtype: int = F16
    bias_kind: str = "none"
    kv_kind: str = "none"
    kernel: str = "block_sm80"
    tile: tuple[int, int] = (64, 64)
    splits: int = 1
    static_seq: bool = False
    n_masks: int = 1
    n_full: int = 3
    n_part: int = 4

    @property
    def layouts(self) -> list[str]:
        names = self.layout.split(",")
        return names * 4 if len(names) == 1 else names

    @property
    def keys(self) -> int:
        return self.seq_q if self.layout == "packed" else self.seq_kv

    def attributes(self) -> dict[str, Any]:
        rows, cols = -(-self.seq_q // self.tile[0]), -(-self.keys // self.tile[1])
        attributes: dict[str, Any] = {
            "scale": 0.125, "num_heads": self.heads, "num_kv_heads": self.kv_heads, "layout": self.layout,
            "bias_kind": self.bias_kind, "kv_kind": self.kv_kind, "mask_seq_q": self.seq_q, "mask_seq_kv": self.keys,
            "tile_m": self.tile[0], "tile_n": self.tile[1], "mask_n_masks": self.n_masks, "mask_rows": rows,
            "mask_cols": cols, "mask_n_full": self.n_full, "mask_n_part": self.n_part, "mask_max_row_tiles": cols,
            "kernel": self.kernel, "splits": self.splits, "plugin_version": "1", "plugin_namespace": "stof",
        }  # fmt: skip
        if self.bias_kind == "relative":
            attributes["rel_rq"] = self.seq_q
        if self.layout == "packed":
            attributes |= {"head_dim": self.dim, "v_head_dim": self.v_dim}
            if self.static_seq:
                attributes["seq"] = self.seq_q
        return attributes

    def heads_tensor(self, layout: str, heads: int, seq: int, dim: int) -> Tensor:
        if layout == "BHSD":
            return Tensor((self.batch, heads, seq, dim), self.dtype)
        if self.rank == 3:
            return Tensor((self.batch, seq, heads * dim), self.dtype)
        return Tensor((self.batch, seq, heads, dim), self.dtype)

    def inputs(self) -> list[Tensor]:
        q, k, v, _ = self.layouts
        if self.layout == "packed":
            width = (self.heads + self.kv_heads) * self.dim + self.kv_heads * self.v_dim
            result = [Tensor((self.batch * self.seq_q, width), self.dtype)]
        else:
            result = [
                self.heads_tensor(q, self.heads, self.seq_q, self.dim),
                self.heads_tensor(k, self.kv_heads, self.seq_kv, self.dim),
                self.heads_tensor(v, self.kv_heads, self.seq_kv, self.v_dim),
            ]
        rows = -(-self.seq_q // self.tile[0])
        bitmap = (max(self.n_part, 1), self.tile[0] // 8, self.tile[1] // 8, 2)
        for dims in (
            (self.n_masks, rows + 1), (max(self.n_full, 1),), (self.n_masks, rows + 1), (max(self.n_part, 1),),
            bitmap, (self.n_masks, rows), (1, 1),
        ):  # fmt: skip
            result.append(Tensor(dims, I32))
        if self.bias_kind == "dense":
            result.append(Tensor((1, self.heads, self.seq_q, self.keys), self.dtype))
        elif self.bias_kind == "relative":
            result.append(Tensor((self.heads, self.seq_q + self.keys - 1), self.dtype))
        if self.kv_kind != "none":
            result.append(Tensor((self.batch, self.keys) if self.kv_kind == "mask" else (self.batch,), I32))
        if self.layout == "packed" and not self.static_seq:
            result.append(Tensor((self.batch, self.seq_q, 8), self.dtype))
        return result

    def output(self) -> Tensor:
        if self.layout == "packed":
            return Tensor((self.batch * self.seq_q, self.heads * self.v_dim), self.dtype)
        if self.layouts[3] == "BHSD":
            return Tensor((self.batch, self.heads, self.seq_q, self.v_dim), self.dtype)
        return Tensor((self.batch, self.seq_q, self.heads * self.v_dim), self.dtype)

    def tensors(self) -> list[Tensor]:
        return [*self.inputs(), self.output()]


def nodes() -> Iterator[Node]:
    """Each layout, dtype and kind of bias and padding."""
    for layout in ("BHSD", "BSHD", "BHSD,BHSD,BSHD,BSHD", "BSHD,BSHD,BHSD,BHSD", "packed"):
        for rank in (3, 4) if "BSHD" in layout else (4,):
            for bias, kv in (("none", "none"), ("dense", "mask"), ("relative", "length"), ("none", "mask")):
                yield Node(layout=layout, rank=rank, bias_kind=bias, kv_kind=kv)
    yield Node(layout="packed", static_seq=True, bias_kind="dense", kv_kind="length")
    yield Node(dtype=F32, kernel="row_wise", tile=(64, 32))
    yield Node(dtype=F32, v_dim=64, n_full=0, n_part=0)
    yield Node(dtype=BF16, splits=4)
    yield Node(kernel="block_sm90", tile=(128, 64))


def assert_refused(plugin: Plugin, tensors: list[Tensor], words: str, outputs: int = 1) -> None:
    """While building and at run time, each with its reason."""
    plugin.host.log()
    bytes_ = plugin.configure(tensors, outputs)
    assert bytes_ == -1 if plugin.host.v3 else bytes_ >= REFUSED_WORKSPACE
    assert words in plugin.host.log()
    shapes, enqueued = plugin.enqueue(tensors, outputs)
    assert enqueued != 0
    assert shapes != 0 or not plugin.host.v3
    assert words in plugin.host.log()
