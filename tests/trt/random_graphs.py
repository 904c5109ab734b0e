"""Random transformers as no exporter writes them: every way to make Q, K and V, and steps that do not keep to rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass
class RandomGraph:
    """One model from a seed. `feeds(rng, batch)` are its inputs, `largest` the sizes to lower for."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    stored: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    weights: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.opset, self.dim = self.pick(17, 18, 19, 20, 21), self.pick(8, 16)
        self.kv_heads, self.group = self.pick(1, 2), self.pick(1, 1, 2)
        self.batch, self.seq = int(self.rng.integers(1, 4)), int(self.rng.integers(4, 30))
        self.dynamic = self.chance(0.3)
        self.width = self.pick(32, self.heads * self.dim)
        self.rotate = self.pick(None, "rotated", "reflected", "part")
        x = "x"
        mask = self.mask()
        for _ in range(self.pick(1, 2, 2)):
            x = self.between(self.op("Add", self.attention(self.norm(x), mask), x))
        self.outputs.insert(0, self.op("Identity", x))

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def largest(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.batch, self.seq, self.width)}

    def model(self) -> onnx.ModelProto:
        shape = ["batch" if self.dynamic else self.batch, self.seq, self.width]
        names = list(dict.fromkeys(self.outputs))
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
            self.stored,
        )
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=self.pick(8, 9)
        )
        inferred = onnx.shape_inference.infer_shapes(model).graph.output
        for value, found in zip(model.graph.output, inferred, strict=True):
            value.CopyFrom(found)
        return model

    def feeds(self, batch: int) -> dict[str, np.ndarray]:
        return {"x": self.rng.standard_normal((batch, self.seq, self.width), np.float32)}

    # -- making nodes

    def pick(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        return self.split(kind, 1, *inputs, **attributes)[0]

    def split(self, kind: str, count: int, *inputs: str, **attributes: object) -> list[str]:
        names = [f"{kind}{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(
            helper.make_node(kind, list(inputs), names, names[0] if self.chance(0.9) else "", **attributes)
        )
        return names

    def const(self, value: object) -> str:
        """Numbers that fp16 holds exactly, as an initializer or a Constant."""
        array = np.asarray(value)
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                half = array.astype(np.float16)
            array = np.where(np.isfinite(half), half, array).astype(np.float32)
        name = f"c{len(self.stored)}_{len(self.nodes)}"
        tensor = numpy_helper.from_array(array, name)
        if self.chance(0.15):
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.stored.append(tensor)
        return name

    def ints(self, *values: int) -> str:
        return self.const(np.array(values, np.int64))

    def vector(self, *shape: int) -> str:
        return self.const(self.rng.standard_normal(shape) * 0.3)

    def weight(self, depth: int, width: int) -> str:
        """At times one that another product has already."""
        if (depth, width) not in self.weights or self.chance(0.8):
            self.weights[depth, width] = self.const(self.rng.standard_normal((depth, width)) / np.sqrt(depth))
        return self.weights[depth, width]

    def mean(self, x: str, axis: int) -> str:
        if self.opset < 18:
            return self.op("ReduceMean", x, axes=[axis], keepdims=1)
        return self.op("ReduceMean", x, self.ints(axis), keepdims=1)

    # -- parts of a layer

    def mask(self) -> str:
        q, k = np.arange(self.seq)[:, None], np.arange(self.seq)[None]
        kinds = {
            "causal": k <= q,
            "window": abs(q - k) < 4,
            "random": (self.rng.random((self.seq, self.seq)) < 0.5) | (q == k),
        }
        kind = self.pick("none", *kinds)
        return (
            ""
            if kind == "none"
            else self.const(np.where(kinds[kind], 0.0, self.pick(-np.inf, -3e38, -1e9))[None, None])
        )

    def norm(self, x: str) -> str:
        kind = self.pick("none", "layer", "rms")
        if kind == "layer":
            return self.op(
                "LayerNormalization", x, self.vector(self.width), self.vector(self.width), axis=self.pick(-1, 2)
            )
        if kind == "none":
            return x
        square = self.op("Mul", x, x) if self.chance(0.5) else self.op("Pow", x, self.const(2.0))
        root = self.op("Sqrt", self.op("Add", self.mean(square, -1), self.const(1e-4)))
        return self.op("Mul", self.op("Div", x, root), self.vector(self.width))

    def linear(self, x: str, depth: int, width: int) -> str:
        """x [B, S, depth] times a weight, with a bias of whatever shape or none; as rows at times."""
        bias = self.pick("", *[self.vector(width)] * 4, self.vector(1, 1, width), self.vector(1))
        if self.chance(0.6):
            y = self.op("MatMul", x, self.weight(depth, width))
            y = y if not bias else self.op("Add", *((y, bias) if self.chance(0.5) else (bias, y)))
        else:
            turned = self.chance(0.3)
            w = self.weight(width, depth) if turned else self.weight(depth, width)
            rows = self.op("Reshape", x, self.ints(-1, depth))
            given = [self.vector(width)] if bias else []
            y = self.op("Gemm", rows, w, *given, transB=int(turned), alpha=self.pick(*[1.0] * 9, 0.5))
            y = self.op("Reshape", y, self.ints(-1, self.seq, width))
        if self.chance(0.06):
            self.outputs.append(y)
        return self.op(self.pick("Identity", "Relu"), y) if self.chance(0.06) else y

    def attention(self, x: str, mask: str) -> str:
        widths = [n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        if self.chance(0.3):
            order = [0, 1, 2] if self.chance(0.7) else [int(i) for i in self.rng.permutation(3)]
            sizes = [widths[i] for i in order]
            cut = self.split(
                "Split", 3, self.linear(x, self.width, sum(widths)), self.ints(*sizes), axis=self.pick(-1, 2)
            )
            q, k, v = (cut[order.index(i)] for i in range(3))
        else:
            other = self.op("Tanh", x) if self.chance(0.1) else x
            q, k, v = (self.linear(s, self.width, n) for s, n in zip((x, other, other), widths, strict=True))
            k = q if widths[0] == widths[1] and self.chance(0.06) else k
            v = k if self.chance(0.06) else v
        heads = [self.to_heads(t, w // self.dim) for t, w in zip((q, k, v), widths, strict=True)]
        if self.rotate:
            heads[:2] = [self.turned(t) for t in heads[:2]]
        if self.group > 1:
            heads[1:] = [self.repeated(t) for t in heads[1:]]
        scores = self.op("MatMul", heads[0], self.op("Transpose", heads[1], perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.const(self.pick(self.dim**-0.5, 0.25)))
        scores = self.op("Add", scores, mask) if mask else scores
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=self.pick(-1, 3)), heads[2])
        rows = self.op("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", rows, self.ints(0, 0, -1)), self.heads * self.dim, self.width)

    def to_heads(self, x: str, heads: int) -> str:
        return self.op("Transpose", self.op("Reshape", x, self.ints(0, 0, heads, self.dim)), perm=[0, 2, 1, 3])

    def repeated(self, x: str) -> str:
        wide = self.op("Expand", self.op("Unsqueeze", x, self.ints(2)), self.ints(1, 1, self.group, 1, 1))
        return self.op("Reshape", wide, self.ints(0, self.heads, self.seq, self.dim))

    def turned(self, x: str) -> str:
        """A rotary embedding, or of half the head, or a reflection that looks like one."""
        size = self.dim // 2 if self.rotate == "part" else self.dim
        angles = np.outer(np.arange(self.seq), 100.0 ** (-np.arange(size // 2) / (size // 2)))
        cos, sin = self.const(np.cos(angles)), self.const(np.sin(angles))
        pieces = [size // 2, size // 2] + [self.dim - size] * (size < self.dim)
        a, b, *rest = self.split("Split", len(pieces), x, self.ints(*pieces), axis=-1)
        signs: tuple[Callable[..., str], ...] = (lambda *t: self.op("Sub", *t), lambda *t: self.op("Add", *t))
        first, second = signs if self.rotate != "reflected" else signs[::-1]
        halves = [
            first(self.op("Mul", a, cos), self.op("Mul", b, sin)),
            second(self.op("Mul", a, sin), self.op("Mul", b, cos)),
        ]
        return self.op("Concat", *halves, *rest, axis=-1)

    def between(self, x: str) -> str:
        """Operators that treat rows alike, and others."""
        steps: dict[str, Callable[[str], str]] = {
            "silu": lambda y: self.op("Mul", y, self.op("Sigmoid", y)),
            "scale": lambda y: self.op("Mul", y, self.vector(*self.pick((self.width,), (1, 1, self.width), (1,), ()))),
            "positions": lambda y: self.op("Add", y, self.vector(*self.pick((self.seq, self.width), (1, self.seq, 1)))),
            "centre": lambda y: self.op("Sub", y, self.mean(y, self.pick(-1, 1, 2))),
            "softmax": lambda y: self.op("Softmax", y, axis=self.pick(-1, 1, 1)),
            "first row": lambda y: self.op("Add", y, self.op("Slice", y, self.ints(0), self.ints(1), self.ints(1))),
            "input": lambda y: self.op("Add", y, "x"),
            "norm": self.norm,
            "feed forward": lambda y: self.op("Add", y, self.linear(self.linear(y, self.width, 48), 48, self.width)),
            "branch": self.branch,
        }
        for name in self.rng.choice(list(steps), int(self.rng.integers(1, 6))):
            x = steps[str(name)](x)
            if self.chance(0.1):
                self.outputs.append(x)
        return x

    def branch(self, x: str) -> str:
        """An If whose branches read tensors of the graph around them."""
        first = self.op("Slice", "x", self.ints(0), self.ints(1), self.ints(2))
        condition = self.op("Greater", self.op("ReduceMax", first, keepdims=0), self.const(self.pick(-9.0, 9.0)))
        bodies = []
        for kind in ("Sin", "Neg"):
            name = f"{kind}_in_{len(self.nodes)}"
            out = helper.make_empty_tensor_value_info(name)
            bodies.append(helper.make_graph([helper.make_node(kind, [x], [name])], kind, [], [out]))
        return self.op("Add", x, self.op("If", condition, then_branch=bodies[0], else_branch=bodies[1]))
