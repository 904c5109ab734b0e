"""A segment as expressions over its inputs, in a normal form: two ways to write one function look alike.

An expression is a number in a table, so that equal ones are the same number. Forms:
- `("input", name)`: a run-time tensor or a weight.
- `("sum", constant, ((coefficient, term), ...))` and `("product", (factor, ...))`, both sorted. A scaled expression is
  a sum of one term. Division is a product with `("inverse", e)`.
- `("matmul", x, weight, transposed)`; `("mean", e)` over the last axis, kept;
  `("layer_norm", x, scale, shift, epsilon)`.
- `("erf", e)` and the other functions of one argument.
Every expression knows how it lies in memory: `full` (rows x width), `row` (one number a row), `vector` (one a column),
or a number. Rows are those of the flattened leading axes: all run-time operands of an operator have the same leading
axes as its output, or it is a Reshape that keeps the last axis; so row r of one tensor meets row r of another
everywhere. Anything that would broadcast in another way is refused. Real arithmetic is what is kept, not rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from stof_onnx.fusion.segment import Segment, attribute, is_scalar
from stof_onnx.fusion.tensors import FLOATS
from stof_onnx.graph.proto_graph import attributes_of
from stof_onnx.graph.proto_shapes import Dim

Term = tuple[float, int]
FUNCTIONS = {  # ONNX operators of one operand, and what expressions and row programs call them
    "Erf": "erf",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Relu": "relu",
    "Sqrt": "sqrt",
    "Exp": "exp",
    "Abs": "abs",
    "Log": "log",
}
FULL, ROW, VECTOR, NUMBER = "full", "row", "vector", "number"
_EPSILON = {"fp32": 2**-20, "fp16": 2**-10, "bf16": 2**-7}  # how far constants may be off: exporters round them


class Unsupported(Exception):
    """An operator, or a way to use it, that has no expression."""


@dataclass(frozen=True)
class Form:
    """How a tensor lies: its kind and its last axis."""

    kind: str
    width: int = 1


class Algebra:
    """The expressions of one segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment, self.tensors = segment, segment.block.tensors
        self._numbers: dict[tuple[object, ...], int] = {}
        self.forms: list[tuple[object, ...]] = []
        self.shapes: list[Form] = []
        self.values: dict[str, int] = {}
        self.weights: dict[int, str] = {}  # matmul: name of its weight
        # Inside, a part may be computed in a wider type (norms of fp16 models are), since kernels compute in fp32.
        ends = [name for name in segment.inputs if not self.tensors.is_constant(name)] + list(segment.outputs)
        types = {self.tensors.types.get(name) for name in ends}
        if len(types) != 1:
            raise Unsupported("it mixes element types")
        self.dtype = FLOATS[types.pop() or 0]
        self.tolerance = _EPSILON[self.dtype]

    # -- making expressions

    def of(self, name: str) -> int:
        """The expression of a tensor.

        Raises:
            Unsupported: see above.
        """
        if name not in self.values:
            position = self.segment.block.producer.get(name, -1)
            if self.segment.start <= position < self.segment.stop:
                node = self.segment.block.operators[position].node
                if len([o for o in node.output if o]) != 1:
                    raise Unsupported(f"{node.op_type} has several outputs")
                self.values[name] = self._operator(node)
                if self.shapes[self.values[name]].kind in (VECTOR, NUMBER):
                    raise Unsupported("a part of it depends on constants only")
                if node.op_type != "Reshape":
                    self._check_rows(node)
            else:
                self.values[name] = self._input(name)
        return self.values[name]

    def form(self, number: int) -> tuple[object, ...]:
        return self.forms[number]

    def number(self, value: float) -> int:
        return self._make(("sum", float(value), ()), Form(NUMBER))

    def as_number(self, e: int) -> float | None:
        """The value of a number; None also for x - x and the like, which operators know at run time only."""
        form = self.forms[e]
        known = form[0] == "sum" and not form[2] and self.shapes[e].kind == NUMBER
        return float(form[1]) if known else None  # type: ignore[arg-type]

    def terms(self, e: int) -> tuple[float, tuple[Term, ...]]:
        """An expression as constant + sum of coefficient · term."""
        form = self.forms[e]
        if form[0] == "sum":
            return float(form[1]), form[2]  # type: ignore[arg-type, return-value]
        return 0.0, ((1.0, e),)

    def factors(self, e: int) -> tuple[float, tuple[int, ...]]:
        """An expression as coefficient · product of factors."""
        constant, terms = self.terms(e)
        if constant or len(terms) != 1:
            return (constant, ()) if not terms else (1.0, (e,))
        coefficient, term = terms[0]
        form = self.forms[term]
        return coefficient, form[1] if form[0] == "product" else (term,)  # type: ignore[return-value]

    def close(self, a: float, b: float) -> bool:
        """Whether a constant of the model is `b`."""
        return abs(a - b) <= self.tolerance * abs(b)

    def add(self, *parts: Term) -> int:
        """Sum of coefficient · expression."""
        constant, found = 0.0, dict[int, float]()
        for scale, e in parts:
            c, terms = self.terms(e)
            constant += scale * c
            for coefficient, term in terms:
                found[term] = found.get(term, 0.0) + scale * coefficient
        shape = self._joined(*(self.shapes[e] for _, e in parts))
        terms = tuple((c, t) for t, c in sorted(found.items()) if c)
        if not constant and len(terms) == 1 and terms[0][0] == 1.0 and self.shapes[terms[0][1]] == shape:
            return terms[0][1]
        return self._make(("sum", constant, terms), shape)

    def multiply(self, *parts: int) -> int:
        coefficient, found = 1.0, list[int]()
        for e in parts:
            c, factors = self.factors(e)
            coefficient *= c
            found += factors
        shape = self._joined(*(self.shapes[e] for e in parts))
        if len(found) > 1:
            product = self._make(("product", tuple(sorted(found))), shape)
        elif found:
            product = found[0]
        else:
            return self.number(coefficient)
        return product if coefficient == 1.0 else self._make(("sum", 0.0, ((coefficient, product),)), shape)

    def apply(self, function: str, e: int) -> int:
        return self._make((function, e), self.shapes[e])

    def inverse(self, e: int) -> int:
        value = self.as_number(e)
        if value is not None:
            return self.number(1.0 / value if value else math.inf)
        coefficient, factors = self.factors(e)
        if not coefficient:
            raise Unsupported("it divides by zero")
        parts = [f[1] if (f := self.forms[x])[0] == "inverse" else self.apply("inverse", x) for x in factors]
        return self.multiply(self.number(1.0 / coefficient), *parts)  # type: ignore[arg-type]

    # -- reading the graph

    def _input(self, name: str) -> int:
        value = self.tensors.value(name) if self.tensors.is_constant(name) else None
        if is_scalar(value):
            assert value is not None
            if value.ndim > 3 or value.dtype.kind not in "f":
                raise Unsupported("a constant is no floating-point number")
            return self.number(float(value.reshape(())))
        if FLOATS.get(self.tensors.types.get(name, 0)) != self.dtype:
            raise Unsupported("it mixes element types")
        return self._make(("input", name), self._form_of(name))

    def _form_of(self, name: str) -> Form:
        dims = self.tensors.shape(name)
        if dims is None or not dims or not isinstance(dims[-1], int):
            raise Unsupported("the shape of an input is not known")
        if self.tensors.is_constant(name) and all(d == 1 for d in dims[:-1]):
            return Form(VECTOR, dims[-1])
        if self.tensors.is_constant(name):
            raise Unsupported("a constant operand is neither a number nor a vector")
        if len(dims) not in (2, 3):
            raise Unsupported(f"a tensor has rank {len(dims)}: regions take 2 and 3")
        return Form(FULL, dims[-1])

    def leading(self, name: str) -> tuple[Dim, ...]:
        """The leading axes of a run-time tensor.

        Raises:
            Unsupported: they are not known.
        """
        dims = self.tensors.shape(name)
        if dims is None or len(dims) not in (2, 3) or None in dims[:-1]:
            raise Unsupported("the leading axes of a tensor are not known, or it has a rank other than 2 and 3")
        return dims[:-1]

    def _check_rows(self, node: onnx.NodeProto) -> None:
        """Nothing broadcasts along rows: every run-time operand has the leading axes of the output."""
        rows = self.leading(node.output[0])
        for name in node.input:
            if name and not self.tensors.is_constant(name) and self.leading(name) != rows:
                raise Unsupported("it broadcasts along rows")

    def _operator(self, node: onnx.NodeProto) -> int:
        op = str(node.op_type)
        if op in FUNCTIONS:
            return self.apply(FUNCTIONS[op], self.of(node.input[0]))
        method = getattr(self, f"_{op.lower()}", None)
        if method is None or node.domain not in ("", "ai.onnx"):
            raise Unsupported(f"{op} has no place in a template")
        made = method(node)
        assert isinstance(made, int)
        return made

    def _identity(self, node: onnx.NodeProto) -> int:
        return self.of(node.input[0])

    def _cast(self, node: onnx.NodeProto) -> int:
        return self.of(node.input[0])

    def _reshape(self, node: onnx.NodeProto) -> int:
        """Another split of the same rows: only where the last axis stays."""
        e = self.of(node.input[0])
        shape, dims = self.shapes[e], self.tensors.shape(node.output[0])
        if dims is None or shape.kind != FULL or dims[-1] != shape.width or len(dims) not in (2, 3):
            raise Unsupported("a Reshape changes the last axis")
        return e

    def _add(self, node: onnx.NodeProto) -> int:
        return self.add(*((1.0, self.of(name)) for name in node.input))

    def _sub(self, node: onnx.NodeProto) -> int:
        a, b = (self.of(name) for name in node.input)
        return self.add((1.0, a), (-1.0, b))

    def _mul(self, node: onnx.NodeProto) -> int:
        return self.multiply(*(self.of(name) for name in node.input))

    def _div(self, node: onnx.NodeProto) -> int:
        a, b = (self.of(name) for name in node.input)
        return self.multiply(a, self.inverse(b))

    def _neg(self, node: onnx.NodeProto) -> int:
        return self.add((-1.0, self.of(node.input[0])))

    def _reciprocal(self, node: onnx.NodeProto) -> int:
        return self.inverse(self.of(node.input[0]))

    def _pow(self, node: onnx.NodeProto) -> int:
        base, exponent = (self.of(name) for name in node.input)
        power = self.as_number(exponent)
        if power in (2.0, 3.0):
            return self.multiply(*[base] * int(power))
        if power in (0.5, -0.5):
            root = self.apply("sqrt", base)
            return root if power == 0.5 else self.inverse(root)
        raise Unsupported("Pow with an exponent other than 2, 3 and ±0.5")

    def _max(self, node: onnx.NodeProto) -> int:
        parts = [self.of(name) for name in node.input]
        rest = [e for e in parts if self.as_number(e) != 0.0]
        if len(parts) != 2 or len(rest) != 1:
            raise Unsupported("Max is fused only with 0")
        return self.apply("relu", rest[0])

    def _gelu(self, node: onnx.NodeProto) -> int:
        kind = attributes_of(node).get("approximate", "none")
        return self.apply("gelu_tanh" if kind == "tanh" else "gelu_erf", self.of(node.input[0]))

    def _matmul(self, node: onnx.NodeProto) -> int:
        return self._product(node, False)

    def _gemm(self, node: onnx.NodeProto) -> int:
        if attribute(node, "transA") or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0:
            raise Unsupported("a Gemm with transA, alpha or beta")
        product = self._product(node, bool(attribute(node, "transB")))
        if len(node.input) < 3 or not node.input[2]:
            return product
        return self.add((1.0, product), (1.0, self.of(node.input[2])))

    def _product(self, node: onnx.NodeProto, transposed: bool) -> int:
        x, weight = self.of(node.input[0]), node.input[1]
        dims = self.tensors.shape(weight)
        if not self.tensors.is_constant(weight) or dims is None or len(dims) != 2:
            raise Unsupported("a product of two run-time tensors")
        depth, width = reversed(dims) if transposed else dims
        if not isinstance(depth, int) or not isinstance(width, int) or self.shapes[x].kind != FULL:
            raise Unsupported("the shape of a weight is not known")
        if FLOATS.get(self.tensors.types.get(weight, 0)) != self.dtype or self.shapes[x].width != depth:
            raise Unsupported("it mixes element types")
        made = self._make(("matmul", x, weight, transposed), Form(FULL, width))
        self.weights[made] = weight
        return made

    def _reducemean(self, node: onnx.NodeProto) -> int:
        e = self.of(node.input[0])
        shape = self.shapes[e]
        axes = attributes_of(node).get("axes")
        if len(node.input) > 1:
            value = self.tensors.value(node.input[1])
            axes = None if value is None else value.tolist()
        last = len(self.leading(node.input[0]))
        if shape.kind != FULL or axes not in ([-1], [last]) or attribute(node, "keepdims", 1) != 1:
            raise Unsupported("a mean over something else than the last axis")
        return self._make(("mean", e), Form(ROW))

    def _layernormalization(self, node: onnx.NodeProto) -> int:
        e = self.of(node.input[0])
        shape = self.shapes[e]
        axis = attribute(node, "axis", -1)
        if shape.kind != FULL or axis not in (-1, len(self.leading(node.input[0]))):
            raise Unsupported("a LayerNormalization over several axes")
        vectors = [self.of(name) for name in node.input[1:3] if name]
        if any(self.shapes[v] != Form(VECTOR, shape.width) for v in vectors):
            raise Unsupported("scale or shift of a LayerNormalization is no constant vector")
        epsilon = attribute(node, "epsilon", 1e-5)
        return self._make(("layer_norm", e, *vectors, epsilon), shape)

    # -- shapes

    def _joined(self, *shapes: Form) -> Form:
        """How an elementwise operation of these lies."""
        widths = {s.width for s in shapes if s.kind in (FULL, VECTOR)}
        if len(widths) > 1:
            raise Unsupported("it broadcasts along columns")
        kinds = {s.kind for s in shapes}
        if FULL in kinds or {ROW, VECTOR} <= kinds:
            return Form(FULL, widths.pop())
        kind = next((k for k in (ROW, VECTOR) if k in kinds), NUMBER)
        return Form(kind, widths.pop() if widths else 1)

    def _make(self, form: tuple[object, ...], shape: Form) -> int:
        key = (form, shape)
        if key not in self._numbers:
            self._numbers[key] = len(self.forms)
            self.forms.append(form)
            self.shapes.append(shape)
        return self._numbers[key]
