"""Row program + configuration → Triton source.

The kernel's parameters are the inputs, the outputs, and `rows` (int32). A program with reductions holds its rows in
registers, cut into chunks of `block` columns that are unrolled here, so that widths that are no power of two (768 = 3 ×
256) waste no lanes; a program without cuts its columns over thread blocks. Reductions see the columns in range only.
"""

from __future__ import annotations

from stof_onnx.kernels.triton_rows.configs import RowConfig, check_config
from stof_onnx.kernels.triton_rows.ir import Kind, Op, RowProgram
from stof_onnx.kernels.triton_rows.reference import scalar_values

KERNEL = "stof_rows"
_TYPES = {"fp16": "tl.float16", "bf16": "tl.bfloat16", "fp32": "tl.float32"}
_NAN = "propagate_nan=tl.PropagateNan.ALL"
_HELPERS = {
    # Near 0 the other form cancels: the series' next term is under 1e-8 of x there.
    "_tanh": """@triton.jit
def _tanh(x):
    s = x * x
    near = x * (1.0 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.05396825397 + s * 0.02186948854))))
    return tl.where(tl.abs(x) < 0.25, near, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


""",
    "_one_plus_tanh": """@triton.jit
def _one_plus_tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x))


""",
}
_FORMS = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "erf": "tl.erf({0})",
    "tanh": "_tanh({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "relu": f"tl.maximum({{0}}, 0.0, {_NAN})",
    "round_fp16": "{0}.to(tl.float16).to(tl.float32)",
    "round_bf16": "{0}.to(tl.bfloat16).to(tl.float32)",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": f"tl.maximum({{0}}, {{1}}, {_NAN})",
    "minimum": f"tl.minimum({{0}}, {{1}}, {_NAN})",
}
# Within a row: how chunks join, how lanes join, and what columns out of range count as.
_JOINS = {
    "row_sum": ("{0} + {1}", "tl.sum({0}, 1, keep_dims=True)", "0.0"),
    "row_mean": ("{0} + {1}", "tl.sum({0}, 1, keep_dims=True)", "0.0"),
    "row_max": ("tl.maximum({0}, {1})", "tl.max({0}, 1, keep_dims=True)", 'float("-inf")'),
    "row_min": ("tl.minimum({0}, {1})", "tl.min({0}, 1, keep_dims=True)", 'float("inf")'),
}


def source(program: RowProgram, config: RowConfig) -> str:
    """The source of a module with the kernel `stof_rows`.

    Raises:
        StofError: the configuration does not fit the program.
    """
    check_config(program, config)
    return _Writer(program, config).text()


def grid_blocks(program: RowProgram, config: RowConfig, rows: int) -> int:
    """Thread blocks of a launch."""
    return -(-rows // config.rows) * column_blocks(program, config)


def column_blocks(program: RowProgram, config: RowConfig) -> int:
    """Thread blocks that share the same rows."""
    return 1 if program.has_reductions else -(-program.cols // config.block)


def signature(program: RowProgram) -> dict[str, str]:
    """Triton types of the kernel's parameters."""
    kinds = {f"in{i}": f"*{given.dtype}" for i, given in enumerate(program.inputs)}
    kinds |= {f"out{i}": f"*{out.dtype}" for i, out in enumerate(program.outputs)}
    return kinds | {"rows": "i32"}


class _Writer:
    """Writes one kernel, top to bottom. A value is one name, or one a chunk where it varies over columns."""

    def __init__(self, program: RowProgram, config: RowConfig) -> None:
        self.program, self.config = program, config
        self.kinds, self.scalars = program.kinds, scalar_values(program)
        self.cut = column_blocks(program, config)  # > 1 or no reductions: one chunk, chosen by the block's index
        self.chunks = -(-program.cols // config.block) if program.has_reductions else 1
        self.ragged = program.cols % config.block != 0
        self.lines: list[str] = []

    def text(self) -> str:
        self._addresses()
        written = [False] * len(self.program.outputs)
        for i, given in enumerate(self.program.inputs):
            for chunk in self._chunks_of(given.kind):
                place = self._place(given.kind, chunk)
                self._line(f"{self._name(i, chunk)} = tl.load(in{i} + {place}.to(tl.float32)")
            self._store(i, written)
        for i, op in enumerate(self.program.ops, len(self.program.inputs)):
            if i in self.scalars:
                self._line(f"{self._name(i, 0)} = {self.scalars[i]!r}")
                continue
            self._compute(i, op)
            self._store(i, written)
        parameters = ", ".join(signature(self.program))
        body = f"@triton.jit\ndef {KERNEL}({parameters}):\n" + "\n".join(self.lines) + "\n"
        helpers = "".join(text for name, text in _HELPERS.items() if f"{name}(" in body)
        return f"import triton\nimport triton.language as tl\n\n\n{helpers}{body}"

    def _line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def _addresses(self) -> None:
        cols, block, rows = self.program.cols, self.config.block, self.config.rows
        index = "tl.program_id(0)" if self.cut == 1 else f"(tl.program_id(0) // {self.cut})"
        self._line(f"r = ({index} * {rows} + tl.arange(0, {rows}))[:, None]")
        self._line("here = r < rows")
        self._line("at = r.to(tl.int64)")
        for chunk in range(self.chunks):
            start = str(chunk * block) if self.cut == 1 else f"(tl.program_id(0) % {self.cut}) * {block}"
            self._line(f"c{chunk} = {start} + tl.arange(0, {block})[None, :]")
            if self._is_ragged(chunk):
                self._line(f"inside = c{chunk} < {cols}")

    def _is_ragged(self, chunk: int) -> bool:
        return self.ragged and (self.cut > 1 or chunk == self.chunks - 1)

    def _chunks_of(self, kind: Kind) -> range:
        return range(self.chunks if kind.per_col else 1)

    def _name(self, value: int, chunk: int) -> str:
        kind = self.kinds[value]
        return f"v{value}_{chunk if kind.per_col else 0}"

    def _place(self, kind: Kind, chunk: int, stored: str = "") -> str:
        """Offset and mask of a load, or of a store of `stored`."""
        inside = "inside" if self._is_ragged(chunk) else ""
        if kind is Kind.ROWS:
            offset, mask = f"at * {self.program.cols} + c{chunk}", " & ".join(filter(None, ("here", inside)))
        elif kind is Kind.VECTOR:
            # Each row loads it, in the layout of the rows: one row for all would change layouts in shared memory.
            offset, mask = f"tl.broadcast_to(c{chunk}, {self.config.rows}, {self.config.block})", inside
        else:
            offset, mask = "at", "here"
        masked = f", mask={mask}" + ("" if stored else ", other=0.0") if mask else ""
        return f"{offset}{f', {stored}' if stored else ''}{masked})"

    def _compute(self, value: int, op: Op) -> None:
        if op.name in _JOINS:
            return self._reduce(value, op)
        for chunk in self._chunks_of(self.kinds[value]):
            operands = [self._name(i, chunk) for i in op.operands]
            self._line(f"{self._name(value, chunk)} = {self._form(value, op, operands, chunk)}")
        return None

    def _form(self, value: int, op: Op, operands: list[str], chunk: int) -> str:
        if op.name == "pow":
            return _power(operands[0], op.constant)
        if op.name == "add" and (factor := self._one_plus_tanh(op, chunk)):
            return factor
        if op.name == "div" and self.kinds[value].per_col:  # one division a row, or none, instead of one an element
            divisor = op.operands[1]
            if self.kinds[divisor] is Kind.COLUMN:
                return f"{operands[0]} * (1.0 / {operands[1]})"
            if 1e-30 < abs(self.scalars.get(divisor, 0.0)) < 1e30:
                return f"{operands[0]} * {1.0 / self.scalars[divisor]!r}"
        return _FORMS[op.name].format(*operands)

    def _one_plus_tanh(self, op: Op, chunk: int) -> str:
        """1 + tanh, as GELU has it: a logistic function, which does not cancel and is cheaper."""
        inputs = len(self.program.inputs)
        for one, other in (op.operands, op.operands[::-1]):
            if self.scalars.get(one) == 1.0 and other >= inputs:
                inner = self.program.ops[other - inputs]
                if inner.name == "tanh":
                    return f"_one_plus_tanh({self._name(inner.operands[0], chunk)})"
        return ""

    def _reduce(self, value: int, op: Op) -> None:
        join, lanes, neutral = _JOINS[op.name]
        operand = op.operands[0]
        total = ""
        for chunk in range(self.chunks):
            part = self._name(operand, chunk)
            if self._is_ragged(chunk):
                part = f"tl.where(inside, {part}, {neutral})"
            total = join.format(total, part) if total else part
        mean = f" * {1.0 / self.program.cols!r}" if op.name == "row_mean" else ""
        self._line(f"{self._name(value, 0)} = {lanes.format(total)}{mean}")

    def _store(self, value: int, written: list[bool]) -> None:
        """Outputs are stored as soon as they exist, which frees their registers."""
        for i, out in enumerate(self.program.outputs):
            if out.value != value or written[i]:
                continue
            written[i] = True
            kind = self.kinds[value]
            for chunk in self._chunks_of(kind):
                rounded = f"{self._name(value, chunk)}.to({_TYPES[out.dtype]})"
                self._line(f"tl.store(out{i} + {self._place(kind, chunk, rounded)}")


def _power(base: str, exponent: float) -> str:
    if exponent.is_integer():
        product = " * ".join([base] * abs(int(exponent)))
        return product if exponent > 0 else f"1.0 / ({product})"
    named = {0.5: f"tl.sqrt_rn({base})", -0.5: f"tl.rsqrt({base})"}
    # NaN for negative bases, as a power that is no whole number has to be.
    return named.get(exponent, f"tl.exp2(tl.log2({base}) * {exponent!r})")
