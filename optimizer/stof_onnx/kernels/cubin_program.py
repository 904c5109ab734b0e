"""What a `StofFusedRegion` node with template `cubin` carries: compiled kernels and how to launch them, as bytes.

Layout, in little-endian 32-bit words (trt_plugins/src/cubin_program.cpp reads it):

    header    magic "STFP", format, length of everything in bytes, FNV-1a of what follows
    nodes     count, then (op, a, b) each: expressions that refer to earlier nodes only
    inputs    count, then type, rank, a node for each axis (NONE: any size)
    outputs   count, then type, rank, a node for each axis
    workspace node: bytes
    kernels   count, then the number of images, and for each: architecture, threads, shared bytes, hidden arguments,
              length and bytes of its name, length and bytes of its cubin (both padded to words)
    launches  count, then kernel, fallback kernel (NONE: none), alignment, three grid nodes, number of arguments,
              and (kind, value) each
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from enum import IntEnum

from stof_onnx.errors import StofError
from stof_onnx.kernels.cubin_expr import BINARY, CONSTANT, SIZE, Expr

MAGIC, FORMAT, NONE = 0x50465453, 1, 0xFFFFFFFF
DTYPES = ("fp16", "bf16", "fp32", "int32")


class ArgKind(IntEnum):
    """What a kernel parameter gets."""

    INPUT = 0  # pointer to an input, by its number
    OUTPUT = 1
    WORKSPACE = 2  # pointer into the workspace, at an expression's bytes
    INT32 = 3  # the value of an expression
    INT64 = 4
    FLOAT32 = 5


@dataclass(frozen=True)
class KernelImage:
    """Machine code for one architecture.

    Attributes:
        arch: compute capability times ten. It runs on that one, and for 8.x on later 8.x, too.
        name: of the kernel in the cubin.
        threads: of a thread block.
        shared: bytes of dynamic shared memory.
        hidden: pointers the compiler appended to the parameters; they are null.
    """

    arch: int
    name: str
    threads: int
    shared: int
    hidden: int
    cubin: bytes


@dataclass(frozen=True)
class Tensor:
    """Type and sizes of an input or output; a size of None is free (inputs only), others are checked."""

    dtype: str
    dims: tuple[Expr | None, ...]


@dataclass(frozen=True)
class Arg:
    kind: ArgKind
    value: int | float | Expr


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: index of the kernel.
        alignment: in bytes, of every pointer the kernel gets; 1 where it assumes none.
        fallback: index of the kernel, of the same geometry and without assumptions, for pointers that are not aligned;
            None: such pointers are an error.
    """

    kernel: int
    alignment: int
    fallback: int | None
    grid: tuple[Expr, Expr, Expr]
    args: tuple[Arg, ...]


@dataclass(frozen=True)
class CubinProgram:
    """Compiled kernels and how to launch them, one after the other. `kernels`: each in its images by architecture."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    workspace: Expr
    kernels: tuple[tuple[KernelImage, ...], ...]
    launches: tuple[Launch, ...]

    @property
    def archs(self) -> tuple[int, ...]:
        """The architectures that every kernel has an image for."""
        common = set.intersection(*({image.arch for image in images} for images in self.kernels))
        return tuple(sorted(common))

    def pack(self) -> bytes:
        """The bytes that an engine holds."""
        return _Packer(self).packed()

    def base64(self) -> str:
        """The text of the node's attribute `program`."""
        return base64.b64encode(self.pack()).decode()


def fnv1a(data: bytes) -> int:
    """32-bit FNV-1a."""
    total = 2166136261
    for byte in data:
        total = (total ^ byte) * 16777619 & 0xFFFFFFFF
    return total


class _Packer:
    def __init__(self, program: CubinProgram) -> None:
        self.program = program
        self.nodes: dict[Expr, int] = {}
        self.node_words: list[int] = []
        self.body = bytearray()

    def packed(self) -> bytes:
        program = self.program
        for tensors in (program.inputs, program.outputs):
            self._words(len(tensors))
            for tensor in tensors:
                dims = [NONE if dim is None else self._node(dim) for dim in tensor.dims]
                self._words(DTYPES.index(tensor.dtype), len(dims), *dims)
        self._words(self._node(program.workspace), len(program.kernels))
        for images in program.kernels:
            self._words(len(images))
            for image in images:
                self._words(image.arch, image.threads, image.shared, image.hidden)
                self._blob(image.name.encode())
                self._blob(image.cubin)
        self._words(len(program.launches))
        for launch in program.launches:
            self._launch(launch)
        body = struct.pack(f"<I{len(self.node_words)}I", len(self.nodes), *self.node_words) + bytes(self.body)
        return struct.pack("<4I", MAGIC, FORMAT, 16 + len(body), fnv1a(body)) + body

    def _launch(self, launch: Launch) -> None:
        fallback = NONE if launch.fallback is None else launch.fallback
        grid = [self._node(axis) for axis in launch.grid]
        self._words(launch.kernel, fallback, launch.alignment, *grid, len(launch.args))
        for arg in launch.args:
            if isinstance(arg.value, Expr):
                self._words(arg.kind, self._node(arg.value))
            elif arg.kind is ArgKind.FLOAT32:
                self._words(arg.kind, struct.unpack("<I", struct.pack("<f", arg.value))[0])
            else:
                self._words(arg.kind, int(arg.value))

    def _node(self, expr: Expr) -> int:
        if expr in self.nodes:
            return self.nodes[expr]
        if expr.op == "constant":
            assert isinstance(expr.left, int)
            words = (CONSTANT, expr.left & 0xFFFFFFFF, expr.left >> 32 & 0xFFFFFFFF)
        elif expr.op == "size":
            assert isinstance(expr.left, int) and isinstance(expr.right, int)
            words = (SIZE, expr.left, expr.right)
        else:
            assert isinstance(expr.left, Expr) and isinstance(expr.right, Expr)
            words = (BINARY[expr.op], self._node(expr.left), self._node(expr.right))
        self.node_words.extend(words)
        self.nodes[expr] = len(self.nodes)
        return self.nodes[expr]

    def _words(self, *values: int) -> None:
        try:
            self.body += struct.pack(f"<{len(values)}I", *values)
        except struct.error as error:
            raise StofError(f"a number does not fit 32 bits ({error})", "cubin program") from error

    def _blob(self, data: bytes) -> None:
        self._words(len(data))
        self.body += data + bytes(-len(data) % 4)
