"""Row programs: what a memory-bound kernel computes for each row of its inputs, as straight-line code in fp32.

A program sees every tensor as `rows` × `cols`. `cols` is static, `rows` is known at launch. A value varies over both
(kind `rows`), over columns only (`vector`: weights), over rows only (`column`: what a reduction yields) or not at all
(`scalar`); operands of different kinds broadcast. Inputs are converted to fp32, outputs are rounded once.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from stof_onnx.errors import StofError

DTYPE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
UNARY = ("neg", "abs", "sqrt", "rsqrt", "exp", "log", "erf", "tanh", "sigmoid", "relu")
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
REDUCTIONS = ("row_sum", "row_mean", "row_max", "row_min")
ROUNDING = ("round_fp16", "round_bf16")
MAX_COLS = 1 << 16
MAX_OPS = 256
MAX_POWER = 8


class Kind(str, Enum):
    """What a value varies over."""

    ROWS = "rows"
    VECTOR = "vector"
    COLUMN = "column"
    SCALAR = "scalar"

    @property
    def per_row(self) -> bool:
        return self in (Kind.ROWS, Kind.COLUMN)

    @property
    def per_col(self) -> bool:
        return self in (Kind.ROWS, Kind.VECTOR)


def _kind(per_row: bool, per_col: bool) -> Kind:
    if per_row:
        return Kind.ROWS if per_col else Kind.COLUMN
    return Kind.VECTOR if per_col else Kind.SCALAR


@dataclass(frozen=True)
class Input:
    """A tensor that the program reads: `rows` [rows, cols], `vector` [cols] or `column` [rows, 1]."""

    kind: Kind
    dtype: str


@dataclass(frozen=True)
class Op:
    """One operation. Operands are indices of values: inputs first, then the results of the operations before this one.

    `constant` belongs to the operations `constant` (its value) and `pow` (the exponent).
    """

    name: str
    operands: tuple[int, ...] = ()
    constant: float = 0.0


@dataclass(frozen=True)
class Output:
    """A value that is written, rounded to `dtype`: [rows, cols], or [rows, 1] for a `column`."""

    value: int
    dtype: str


@dataclass(frozen=True)
class RowProgram:
    """A checked program; `RowBuilder` is the convenient way to make one.

    Raises:
        StofError: the parts do not make a program.
    """

    cols: int
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]

    def __post_init__(self) -> None:
        _check(self)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of every value: of the inputs, then of the results of the operations."""
        kinds = [given.kind for given in self.inputs]
        for op in self.ops:
            kinds.append(_result_kind(op, [kinds[i] for i in op.operands]))
        return tuple(kinds)

    @property
    def has_reductions(self) -> bool:
        return any(op.name in REDUCTIONS for op in self.ops)

    @property
    def key(self) -> str:
        """SHA-256 of the program, first 16 hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The program as JSON text, always the same for equal programs."""
        return json.dumps(
            {
                "cols": self.cols,
                "inputs": [[given.kind.value, given.dtype] for given in self.inputs],
                "ops": [[op.name, list(op.operands), op.constant] for op in self.ops],
                "outputs": [[out.value, out.dtype] for out in self.outputs],
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> RowProgram:
        """The program that `to_json` wrote.

        Raises:
            StofError: the text is no program.
        """
        try:
            data = json.loads(text)
            return RowProgram(
                cols=data["cols"],
                inputs=tuple(Input(Kind(kind), dtype) for kind, dtype in data["inputs"]),
                ops=tuple(Op(name, tuple(operands), float(constant)) for name, operands, constant in data["ops"]),
                outputs=tuple(Output(value, dtype) for value, dtype in data["outputs"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise StofError(f"is no row program ({error})", "row program") from error


def _result_kind(op: Op, kinds: list[Kind]) -> Kind:
    if op.name in REDUCTIONS:
        return Kind.COLUMN
    return _kind(any(k.per_row for k in kinds), any(k.per_col for k in kinds))


def _check(program: RowProgram) -> None:
    def refuse(what: str) -> StofError:
        return StofError(what, "row program")

    if not isinstance(program.cols, int) or not 1 <= program.cols <= MAX_COLS:
        raise refuse(f"{program.cols} columns are outside [1, {MAX_COLS}]")
    if len(program.ops) > MAX_OPS:
        raise refuse(f"{len(program.ops)} operations are more than {MAX_OPS}")
    if not program.inputs or not program.outputs or not any(given.kind.per_row for given in program.inputs):
        raise refuse("needs an input that varies over rows, and an output")
    types = [given.dtype for given in program.inputs] + [out.dtype for out in program.outputs]
    if any(dtype not in DTYPE_BYTES for dtype in types):
        raise refuse(f"knows the types {', '.join(DTYPE_BYTES)}")
    if any(given.kind is Kind.SCALAR for given in program.inputs):
        raise refuse("has no scalar inputs: use constants")
    kinds = [given.kind for given in program.inputs]
    for op in program.ops:
        if any(not isinstance(i, int) or not 0 <= i < len(kinds) for i in op.operands):
            raise refuse(f"operation {op.name} reads a value that does not exist before it")
        if len(op.operands) != _arity(op.name):
            raise refuse(f"operation {op.name} has {len(op.operands)} operands")
        if not math.isfinite(op.constant):
            raise refuse(f"operation {op.name} has the constant {op.constant}")
        if op.name == "pow" and (op.constant == 0 or (op.constant.is_integer() and abs(op.constant) > MAX_POWER)):
            raise refuse(f"has a power of {op.constant:g}: whole exponents are 1 to {MAX_POWER}, or negative ones")
        operands = [kinds[i] for i in op.operands]
        if op.name in REDUCTIONS and operands != [Kind.ROWS]:
            raise refuse(f"{op.name} reduces what varies over rows and columns, not a {operands[0].value}")
        kinds.append(_result_kind(op, operands))
    for out in program.outputs:
        if not isinstance(out.value, int) or not 0 <= out.value < len(kinds) or not kinds[out.value].per_row:
            raise refuse("an output must be a value that varies over rows")


def _arity(name: str) -> int:
    for arity, names in ((0, ("constant",)), (1, (*UNARY, *REDUCTIONS, *ROUNDING, "pow")), (2, BINARY)):
        if name in names:
            return arity
    raise StofError(f"has the unknown operation {name}", "row program")


class RowBuilder:
    """Builds a program value by value; a value is its index. Equal operations are computed once."""

    def __init__(self, cols: int) -> None:
        self.cols = cols
        self._inputs: list[Input] = []
        self._nodes: list[Op] = []  # operands ≥ 0 are nodes, negative ones inputs: -1 - index
        self._outputs: list[Output] = []
        self._seen: dict[Op, int] = {}

    def rows(self, dtype: str) -> int:
        """An input [rows, cols]."""
        return self._input(Kind.ROWS, dtype)

    def vector(self, dtype: str) -> int:
        """An input [cols]."""
        return self._input(Kind.VECTOR, dtype)

    def column(self, dtype: str) -> int:
        """An input [rows, 1]."""
        return self._input(Kind.COLUMN, dtype)

    def _input(self, kind: Kind, dtype: str) -> int:
        self._inputs.append(Input(kind, dtype))
        return -len(self._inputs)

    def constant(self, value: float) -> int:
        return self.op("constant", constant=float(value))

    def pow(self, value: int, exponent: float) -> int:
        """`value` to a constant power."""
        return self.op("pow", value, constant=float(exponent))

    def round_to(self, value: int, dtype: str) -> int:
        """Rounds to fp16 or bf16 and back, where a graph's own rounding shall be kept. fp32: nothing to do."""
        return value if dtype == "fp32" else self.op(f"round_{dtype}", value)

    def op(self, name: str, *operands: int, constant: float = 0.0) -> int:
        """Any operation of the tables above by its name."""
        node = Op(name, operands, constant)
        if node not in self._seen:
            self._seen[node] = len(self._nodes)
            self._nodes.append(node)
        return self._seen[node]

    def add(self, a: int, b: int) -> int:
        return self.op("add", a, b)

    def sub(self, a: int, b: int) -> int:
        return self.op("sub", a, b)

    def mul(self, a: int, b: int) -> int:
        return self.op("mul", a, b)

    def div(self, a: int, b: int) -> int:
        return self.op("div", a, b)

    def output(self, value: int, dtype: str) -> None:
        """Writes `value`; outputs are numbered in the order of these calls."""
        self._outputs.append(Output(value, dtype))

    def build(self) -> RowProgram:
        """The program.

        Raises:
            StofError: it breaks a rule of `RowProgram`.
        """
        inputs = len(self._inputs)

        def place(value: int) -> int:
            return -1 - value if value < 0 else inputs + value

        return RowProgram(
            self.cols,
            tuple(self._inputs),
            tuple(Op(op.name, tuple(map(place, op.operands)), op.constant) for op in self._nodes),
            tuple(Output(place(out.value), out.dtype) for out in self._outputs),
        )


def describe(program: RowProgram) -> str:
    """The program as readable lines, for reports."""
    lines: list[str] = []
    for i, given in enumerate(program.inputs):
        lines.append(f"v{i} = {given.kind.value} {given.dtype}")
    for i, op in enumerate(program.ops, len(program.inputs)):
        arguments: list[Any] = [f"v{j}" for j in op.operands]
        if op.name in ("constant", "pow"):
            arguments.append(op.constant)
        lines.append(f"v{i} = {op.name}({', '.join(map(str, arguments))})")
    lines.append("return " + ", ".join(f"v{out.value} as {out.dtype}" for out in program.outputs))
    return "\n".join(lines)
