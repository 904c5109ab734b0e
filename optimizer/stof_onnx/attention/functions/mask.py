"""`stof::StofMask_<variant>`: the dense additive term that attention bodies share, in standard operators.

It joins what adds to the scores: the decoded static mask, run-time key padding and the bias. Called once for all
attention nodes that share these, so that each of them pays one Add. No tensor of the size of the mask is wider than the
result (int64 indices never are): a static mask is decoded as bool, one byte an element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from stof_onnx.attention.functions.builder import FunctionBuilder
from stof_onnx.attention.functions.decode import DECODE_INPUTS, Geometry, decode
from stof_onnx.attention.functions.forms import Form
from stof_onnx.attention.types import BiasKind, KvKind, MaskedRow

PREFIX = "StofMask"


@dataclass(frozen=True)
class MaskVariant:
    """Everything that selects a body.

    Attributes:
        seq_q, seq_kv: the sizes of the result, or of the encoded mask where `q_form` or `k_form` says that the
            run-time size comes from Q or K, which are inputs then.
        static: how the encoded mask is cut; None when it hides nothing.
        bias, rel_rq: the bias that is an input.
        kv: run-time padding that is an input.
        empty_rows: what a row without keys yields; None when there can be none. ZERO adds the output `row_ok`.
        bias_hides: the dense bias may hold -inf, which can leave a row without keys too.
        double: the result is float64, else float32.
    """

    seq_q: int
    seq_kv: int
    static: Geometry | None
    bias: BiasKind
    rel_rq: int
    kv: KvKind
    empty_rows: MaskedRow | None
    bias_hides: bool = False
    q_form: Form | None = None
    k_form: Form | None = None
    double: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        return (
            *(DECODE_INPUTS if self.static else ()),
            *(("bias",) if self.bias is not BiasKind.NONE else ()),
            *(("kv_mask",) if self.kv is not KvKind.NONE else ()),
            *(("Q",) if self.q_form else ()),
            *(("K",) if self.k_form else ()),
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("mask", "row_ok") if self.empty_rows is MaskedRow.ZERO else ("mask",)

    @property
    def name(self) -> str:
        dynamic = "upto" if self.q_form or self.k_form else ""
        parts = [PREFIX]
        if self.static or self.bias is BiasKind.RELATIVE or self.kv is KvKind.LENGTH:
            parts.append(f"{dynamic}{self.seq_q}x{self.seq_kv}")
        parts += [self.static.name] if self.static else []
        if self.bias is BiasKind.RELATIVE:
            parts.append(f"relativebias{self.rel_rq}")
        elif self.bias is BiasKind.DENSE:
            parts.append("densebias")
        parts += [] if self.kv is KvKind.NONE else [f"kv{self.kv.value}"]
        parts += [] if self.empty_rows is None else [f"{self.empty_rows.value}rows"]
        parts += ["hidingbias"] * self.bias_hides
        parts += [f"q{self.q_form.value}"] if self.q_form else []
        parts += [f"k{self.k_form.value}"] if self.k_form else []
        return "_".join(parts + ["f64"] * self.double)


def mask_function(variant: MaskVariant, opset: int) -> onnx.FunctionProto:
    """The function of `variant` for a model of that opset (17 or newer).

    Its output `mask` [1|B, 1|H, S_q or 1, S_kv] is the bias (or 0) where the key is allowed and -inf elsewhere; in rows
    without keys it is what makes softmax(scores + mask) yield `empty_rows`: the lowest finite number everywhere (it
    absorbs any score: uniform), the bias alone (scores), or -inf (NaN; also `zero`, whose rows the body sets by
    `row_ok` [1|B, 1|H, S_q or 1, 1]).
    """
    b = FunctionBuilder(variant.name, variant.inputs, variant.outputs, opset, doc=_DOC)
    to = onnx.TensorProto.DOUBLE if variant.double else onnx.TensorProto.FLOAT
    real = np.float64 if variant.double else np.float32
    sizes = _Sizes(b, variant)

    allowed = _allowed(b, variant, sizes)
    bias = _bias(b, variant, sizes, to)
    hidden = b.const(-np.inf, real)

    def give(fill: str) -> None:
        """Makes the output: the bias (or 0) where the key is allowed, `fill` elsewhere."""
        if allowed is not None:
            b.returns("Where", allowed, bias or b.const(0, real), fill, output="mask")
        else:
            assert bias is not None, "a mask function without a mask, padding or bias"
            b.returns("Identity", bias, output="mask")

    if variant.empty_rows in (None, MaskedRow.NAN):
        give(hidden)
    elif variant.bias_hides:
        assert bias is not None
        additive = bias if allowed is None else b.op("Where", allowed, bias, hidden, name="additive")
        some = b.op("Greater", b.reduce("ReduceMax", additive, -1), hidden, name="some")
        if variant.empty_rows is MaskedRow.ZERO:
            b.returns("Identity", some, output="row_ok")
            b.returns("Identity", additive, output="mask")
        else:
            b.returns("Where", some, additive, b.const(np.finfo(real).min, real), output="mask")
    else:
        assert allowed is not None, "rows can not be empty without a mask or padding"
        counted = b.op("Cast", allowed, to=onnx.TensorProto.FLOAT)
        some = b.op("Cast", b.reduce("ReduceSum", counted, -1), to=onnx.TensorProto.BOOL, name="some")
        if variant.empty_rows is MaskedRow.ZERO:
            b.returns("Identity", some, output="row_ok")
            give(hidden)
        elif variant.empty_rows is MaskedRow.MEAN:
            give(b.op("Where", some, hidden, b.const(np.finfo(real).min, real), name="fill"))
        else:
            allowed = b.op("Or", allowed, b.op("Not", some, name="none"), name="allowed_or_raw")
            give(hidden)
    return b.build()


class _Sizes:
    """The run-time S_q and S_kv, as 1-D int64 tensors or constants."""

    def __init__(self, b: FunctionBuilder, variant: MaskVariant) -> None:
        self._b, self._v = b, variant
        self._known: dict[str, str] = {}

    @property
    def dynamic(self) -> bool:
        return bool(self._v.q_form or self._v.k_form)

    @property
    def q(self) -> str:
        return self._size("Q", self._v.q_form, self._v.seq_q)

    @property
    def kv(self) -> str:
        return self._size("K", self._v.k_form, self._v.seq_kv)

    def _size(self, tensor: str, form: Form | None, static: int) -> str:
        if form is None:
            return self._b.ints(static)
        if tensor not in self._known:
            shape = self._b.op("Shape", tensor)
            axis = form.seq_axis
            self._known[tensor] = self._b.op(
                "Slice", shape, self._b.ints(axis), self._b.ints(axis + 1), name=f"seq_{tensor.lower()}"
            )
        return self._known[tensor]


def _allowed(b: FunctionBuilder, variant: MaskVariant, sizes: _Sizes) -> str | None:
    """bool [1|B, 1|H, S_q or 1, S_kv], or None when every key is allowed."""
    static = None
    if variant.static:
        static = decode(b, variant.static)
        if sizes.dynamic:
            ends = b.op("Concat", sizes.q, sizes.kv, axis=0, name="ends")
            static = b.op("Slice", static, b.ints(0, 0), ends, b.ints(2, 3), name="static")
    if variant.kv is KvKind.NONE:
        return static
    if variant.kv is KvKind.MASK:
        keys = b.op("Cast", "kv_mask", to=onnx.TensorProto.BOOL)
    else:
        count = b.op("Squeeze", sizes.kv, b.ints(0), name="count")
        index = b.op("Range", b.const(0, np.int64), count, b.const(1, np.int64), name="index")
        length = b.op("Unsqueeze", b.op("Cast", "kv_mask", to=onnx.TensorProto.INT64), b.ints(1), name="length")
        keys = b.op("Less", index, length)
    keys = b.op("Unsqueeze", keys, b.ints(1, 2), name="keys_ok")
    return keys if static is None else b.op("And", static, keys, name="allowed")


def _bias(b: FunctionBuilder, variant: MaskVariant, sizes: _Sizes, to: int) -> str | None:
    """The bias as [1|B, 1|H, S_q, S_kv] of element type `to`, or None."""
    if variant.bias is BiasKind.NONE:
        return None
    bias = b.op("Cast", "bias", to=to, name="bias_cast")
    return bias if variant.bias is BiasKind.DENSE else _expand_relative(b, bias, variant.rel_rq, sizes)


def _expand_relative(b: FunctionBuilder, vector: str, rel_rq: int, sizes: _Sizes) -> str:
    """[1|H, Rq+Rk-1] to [1, 1|H, S_q, S_kv] with entry k - q + Rq - 1 at (q, k).

    Each of S_q copies of the L = S_q + S_kv - 1 entries in use is shifted by one more against the one before it:
    written as rows of L and read back as rows of L - 1. (With L = 1 there is one row and nothing to shift.)
    """
    one = b.ints(1)
    rows_less = b.op("Sub", sizes.q, one, name="rows_less")
    width = b.op("Add", rows_less, sizes.kv, name="width")
    start = b.op("Sub", b.ints(rel_rq), sizes.q, name="start")
    used = b.op("Slice", vector, start, b.op("Add", start, width, name="end"), one, name="used")
    padded = b.op("Pad", used, b.ints(0, 0, 0, 1), name="padded")
    shape = b.op("Concat", one, sizes.q, one, axis=0, name="copies")
    rows = b.op("Expand", b.op("Unsqueeze", padded, one), shape, name="rows")
    flat = b.op("Reshape", rows, b.ints(0, -1), name="flat")
    # Padded rows are width + 1 long, so rows of `width` read the next copy one entry later.
    end = b.op("Add", rows_less, b.op("Mul", sizes.q, width, name="area"), name="flat_end")
    shifted = b.op("Slice", flat, rows_less, end, one, name="shifted")
    target = b.op("Concat", b.ints(0, -1), width, axis=0, name="shifted_shape")
    dense = b.op("Slice", b.op("Reshape", shifted, target), b.ints(0), sizes.kv, b.ints(2), name="dense")
    return b.op("Unsqueeze", dense, b.ints(0), name="bias_dense")


_DOC = (
    "The term that attention adds to its scores: the bias (or 0) where a key is allowed, -inf where it is hidden. "
    "Only function bodies read it; lowering to plugin nodes drops it."
)
