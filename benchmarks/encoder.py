"""A transformer encoder as exporters write it (opset 17, masked attention spelled out), made from a seed.

For benchmarks and tests at sizes that no exported file should be carried around for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass(frozen=True)
class EncoderSpec:
    """`batch` and `seq` may be names of dynamic axes; then `mask` has the largest sequence's size.

    projections: "separate" (three MatMul + Add), "split" (one Gemm of rows and a Split, as GPT-2), "gemm" (three Gemm
    of rows). `pre_norm`: the norm ahead of the attention, and the residual around both.
    """

    layers: int = 2
    hidden: int = 768
    heads: int = 12
    batch: int | str = 1
    seq: int | str = 128
    projections: str = "separate"
    pre_norm: bool = False
    decomposed_norm: bool = False
    seed: int = 0


def build_encoder(spec: EncoderSpec, mask: np.ndarray | None) -> onnx.ModelProto:
    """The model: input `x` [batch, seq, hidden] float32, output `y`.

    Args:
        spec: sizes and style.
        mask: bool [S, S], True = attend; None for no mask. Written as an additive float32 initializer of 0 and -3.4e38.
    """
    return _Builder(spec, mask).build()


def make_mask(kind: str, seq: int, block: int = 64) -> np.ndarray:
    """bool [seq, seq], True = attend: the masks of docs/benchmarks.md."""
    q, k = np.arange(seq, dtype=np.int16)[:, None], np.arange(seq, dtype=np.int16)[None]
    width = window_width(seq)
    if kind == "causal":
        return k <= q
    if kind == "window":
        return np.abs(q - k) <= 64
    if kind == "longformer":
        return (np.abs(q - k) <= width) | (q < width) | (k < width)
    if kind == "bigbird":
        blocks = seq // block
        rows = np.arange(blocks)
        allowed = np.abs(rows[:, None] - rows[None]) <= 1
        allowed[[0, -1]] = True
        allowed[:, [0, -1]] = True
        rng = np.random.default_rng(0)
        for row in range(blocks):
            allowed[row, rng.choice(blocks, 3, replace=False)] = True
        return np.kron(allowed, np.ones((block, block), bool))
    raise ValueError(kind)


def window_width(seq: int) -> int:
    """Half width, and global tokens, of the Longformer mask."""
    return max(32, int(np.sqrt(seq)))


class _Builder:
    def __init__(self, spec: EncoderSpec, mask: np.ndarray | None) -> None:
        self.spec, self.rng = spec, np.random.default_rng(spec.seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.dim = spec.hidden // spec.heads
        seq = spec.seq if isinstance(spec.seq, int) else 0
        batch = spec.batch if isinstance(spec.batch, int) else 0
        # Reshape copies a size of 0 from its input, which serves as long as the axis stays where it is.
        self.to_heads = self.const("to_heads", np.array([batch, seq, spec.heads, self.dim], np.int64))
        self.to_hidden = self.const("to_hidden", np.array([batch, seq, spec.hidden], np.int64))
        self.mask = ""
        if mask is not None:
            additive = np.where(mask, 0, np.finfo(np.float32).min).astype(np.float32)
            self.mask = self.const("mask", additive[None, None])

    def build(self) -> onnx.ModelProto:
        spec, x = self.spec, "x"
        if self.mask and not isinstance(spec.seq, int):
            self.mask = self.cut_mask()
        for layer in range(spec.layers):
            x = self.layer(x, f"layer{layer}")
        self.op("Identity", [x], "y")
        shape = [spec.batch, spec.seq, spec.hidden]
        graph = helper.make_graph(
            self.nodes,
            "encoder",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
            self.initializers,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def layer(self, x: str, name: str) -> str:
        spec = self.spec
        source = self.norm(x, f"{name}/ln1") if spec.pre_norm else x
        attended = self.dense(self.attention(source, name), spec.hidden, spec.hidden, f"{name}/out")
        middle = self.op("Add", [attended, x], f"{name}/res1")
        if not spec.pre_norm:
            middle = self.norm(middle, f"{name}/ln1")
        inner = self.norm(middle, f"{name}/ln2") if spec.pre_norm else middle
        inner = self.gelu(self.dense(inner, spec.hidden, 4 * spec.hidden, f"{name}/fc1"), name)
        out = self.op("Add", [self.dense(inner, 4 * spec.hidden, spec.hidden, f"{name}/fc2"), middle], f"{name}/res2")
        return out if spec.pre_norm else self.norm(out, f"{name}/ln2")

    def attention(self, x: str, name: str) -> str:
        q, k, v = self.projections(x, name)
        heads = []
        for tensor, perm in ((q, [0, 2, 1, 3]), (k, [0, 2, 3, 1]), (v, [0, 2, 1, 3])):
            split = self.op("Reshape", [tensor, self.to_heads], f"{tensor}/heads")
            heads.append(self.op("Transpose", [split], f"{tensor}/bhsd", perm=perm))
        scores = self.op("MatMul", heads[:2], f"{name}/scores")
        root = self.const(f"{name}/root", np.array(np.sqrt(self.dim), np.float32))
        scores = self.op("Div", [scores, root], f"{name}/scaled")
        if self.mask:
            scores = self.op("Add", [scores, self.mask], f"{name}/masked")
        p = self.op("Softmax", [scores], f"{name}/p", axis=-1)
        out = self.op("Transpose", [self.op("MatMul", [p, heads[2]], f"{name}/o")], f"{name}/o_bshd", perm=[0, 2, 1, 3])
        return self.op("Reshape", [out, self.to_hidden], f"{name}/attended")

    def projections(self, x: str, name: str) -> list[str]:
        hidden, style = self.spec.hidden, self.spec.projections
        if style == "separate":
            return [self.dense(x, hidden, hidden, f"{name}/{part}") for part in "qkv"]
        rows = self.op("Reshape", [x, self.const(f"{name}/rows", np.array([-1, hidden], np.int64))], f"{name}/x_rows")
        if style == "gemm":
            return [
                self.op("Reshape", [self.gemm(rows, hidden, f"{name}/{part}"), self.to_hidden], f"{name}/{part}3")
                for part in "qkv"
            ]
        wide = [*(s if isinstance(s, int) else 0 for s in (self.spec.batch, self.spec.seq)), 3 * hidden]
        target = self.const(f"{name}/wide", np.array(wide, np.int64))
        if not isinstance(self.spec.batch, int) or not isinstance(self.spec.seq, int):
            raise ValueError("a Split of rows needs fixed sizes")
        qkv = self.op("Reshape", [self.gemm(rows, 3 * hidden, f"{name}/qkv"), target], f"{name}/qkv3")
        outputs = [f"{name}/{part}" for part in "qkv"]
        sizes = self.const(f"{name}/sizes", np.full(3, hidden, np.int64))
        self.nodes.append(helper.make_node("Split", [qkv, sizes], outputs, f"{name}/split", axis=2))
        return outputs

    def cut_mask(self) -> str:
        """mask[:, :, :S, :S] for the S of the run."""
        shape = self.op("Shape", ["x"], "x_shape")
        one, two = (self.const(f"at{n}", np.array([n], np.int64)) for n in (1, 2))
        seq = self.op("Slice", [shape, one, two], "x_seq")
        ends = self.op("Concat", [seq, seq], "mask_ends", axis=0)
        starts = self.const("mask_starts", np.zeros(2, np.int64))
        return self.op(
            "Slice", [self.mask, starts, ends, self.const("mask_axes", np.array([2, 3], np.int64))], "mask_cut"
        )

    def gelu(self, x: str, name: str) -> str:
        inner = self.op("Div", [x, self.const(f"{name}/sqrt2", np.array(np.sqrt(2), np.float32))], f"{name}/gelu_in")
        erf = self.op("Erf", [inner], f"{name}/erf")
        scaled = self.op("Add", [erf, self.const(f"{name}/one", np.array(1, np.float32))], f"{name}/erf1")
        product = self.op("Mul", [x, scaled], f"{name}/gelu2")
        return self.op("Mul", [product, self.const(f"{name}/half", np.array(0.5, np.float32))], f"{name}/gelu")

    def norm(self, x: str, name: str) -> str:
        hidden = self.spec.hidden
        scale = self.const(f"{name}/scale", 1 + 0.1 * self.rng.standard_normal(hidden, np.float32))
        shift = self.const(f"{name}/shift", 0.1 * self.rng.standard_normal(hidden, np.float32))
        if not self.spec.decomposed_norm:
            return self.op("LayerNormalization", [x, scale, shift], name, axis=-1, epsilon=1e-5)
        mean = self.op("ReduceMean", [x], f"{name}/mean", axes=[-1], keepdims=1)
        centred = self.op("Sub", [x, mean], f"{name}/centred")
        square = self.op("Pow", [centred, self.const(f"{name}/two", np.array(2, np.float32))], f"{name}/square")
        variance = self.op("ReduceMean", [square], f"{name}/variance", axes=[-1], keepdims=1)
        eps = self.const(f"{name}/eps", np.array(1e-5, np.float32))
        root = self.op("Sqrt", [self.op("Add", [variance, eps], f"{name}/safe")], f"{name}/root")
        normal = self.op("Div", [centred, root], f"{name}/normal")
        return self.op("Add", [self.op("Mul", [normal, scale], f"{name}/stretched"), shift], name)

    def dense(self, x: str, inputs: int, outputs: int, name: str) -> str:
        product = self.op("MatMul", [x, self.weight(inputs, outputs, name)], f"{name}/product")
        return self.op("Add", [self.bias(outputs, name), product], f"{name}/y")

    def gemm(self, rows: str, outputs: int, name: str) -> str:
        weight = self.weight(self.spec.hidden, outputs, name)
        return self.op("Gemm", [rows, weight, self.bias(outputs, name)], f"{name}/gemm")

    def weight(self, inputs: int, outputs: int, name: str) -> str:
        values = self.rng.standard_normal((inputs, outputs), np.float32) / np.float32(np.sqrt(inputs))
        return self.const(f"{name}/w", values)

    def bias(self, outputs: int, name: str) -> str:
        return self.const(f"{name}/b", 0.1 * self.rng.standard_normal(outputs, np.float32))

    def const(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def op(self, kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], f"{output}/{kind}", **attributes))
        return output
