"""`stof::StofAttention_<variant>`: the node contract of docs/architecture.md in standard operators."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from stof_onnx.attention.functions.builder import FunctionBuilder
from stof_onnx.attention.functions.forms import Form, to_bhds, to_bhsd
from stof_onnx.attention.types import BiasKind, KvKind
from stof_onnx.mask import ONNX_INPUTS

PREFIX = "StofAttention"
ATTRIBUTES = (
    "scale",
    "softcap",
    "num_heads",
    "num_kv_heads",
    "tile_m",
    "tile_n",
    "layout",
    "bias_kind",
    "rel_rq",
    "kv_kind",
    "masked_row",
    "mask_seq_q",
    "mask_seq_kv",
)
DTYPE_NAMES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "f32",
    onnx.TensorProto.FLOAT16: "f16",
    onnx.TensorProto.BFLOAT16: "bf16",
    onnx.TensorProto.DOUBLE: "f64",
}


def compute_type(dtype: int) -> int:
    """The element type scores and softmax are computed in: float32, or float64 for a float64 model."""
    return onnx.TensorProto.DOUBLE if dtype == onnx.TensorProto.DOUBLE else onnx.TensorProto.FLOAT


@dataclass(frozen=True)
class AttentionVariant:
    """Everything that selects a body. `dtype` is the element type of Q, K, V and O.

    `has_mask`: the last input but `row_ok` is the additive term that StofMask made, which already holds the bias and
    the run-time padding; without it a dense bias is added by the body itself. `zero_rows`: input `row_ok` tells the
    rows that see a key, all others yield zeros.
    """

    q: Form
    k: Form
    v: Form
    o: Form
    num_heads: int
    num_kv_heads: int
    dtype: int
    softcap: bool
    bias: BiasKind
    kv: KvKind
    has_mask: bool
    zero_rows: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        extra = (
            ("bias", self.bias is not BiasKind.NONE),
            ("kv_mask", self.kv is not KvKind.NONE),
            ("mask", self.has_mask),
            ("row_ok", self.zero_rows),
        )
        return ("Q", "K", "V", *ONNX_INPUTS, *(name for name, there in extra if there))

    @property
    def name(self) -> str:
        forms = [f.value for f in (self.q, self.k, self.v, self.o)]
        parts = [PREFIX, *(forms[:1] if len(set(forms)) == 1 else forms)]
        if self.num_heads != self.num_kv_heads:
            parts.append(f"h{self.num_heads}kv{self.num_kv_heads}")
        elif Form.BSH in (self.q, self.k, self.v):
            parts.append(f"h{self.num_heads}")
        parts.append(DTYPE_NAMES[self.dtype])
        parts += ["softcap"] * self.softcap
        parts += [] if self.bias is BiasKind.NONE else [f"{self.bias.value}bias"]
        parts += [] if self.kv is KvKind.NONE else [f"kv{self.kv.value}"]
        parts += ["mask"] * self.has_mask + ["zerorows"] * self.zero_rows
        return "_".join(parts)


def attention_function(variant: AttentionVariant, opset: int) -> onnx.FunctionProto:
    """The function of `variant` for a model of that opset (17 or newer).

    O = softmax(softcap(scale * Q K^T) + additive) V. Scores, softmax and sums are float32 whatever the dtype. With
    grouped heads the queries of one group are stacked along S, so K and V are never expanded.
    """
    b = FunctionBuilder(variant.name, variant.inputs, ["O"], opset, ATTRIBUTES, _doc(variant))
    compute = compute_type(variant.dtype)
    grouped = variant.num_heads != variant.num_kv_heads
    by_group, by_head = b.ints(0, variant.num_kv_heads, -1, 0), b.ints(0, variant.num_heads, -1, 0)

    q, k, v = (_cast(b, name, variant.dtype, compute) for name in "QKV")
    q = b.op("Mul", q, b.attribute("scale", compute), name="q_scaled")
    q = to_bhsd(b, q, variant.q, variant.num_heads)
    if grouped:
        q = b.op("Reshape", q, by_group, name="q_grouped")
    scores = b.op("MatMul", q, to_bhds(b, k, variant.k, variant.num_kv_heads), name="scores")
    if grouped:
        scores = b.op("Reshape", scores, by_head, name="scores")
    if variant.softcap:
        cap = b.attribute("softcap", compute)
        scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap, name="scores_capped")
    if variant.has_mask:
        scores = b.op("Add", scores, "mask", name="scores_masked")
    elif variant.bias is BiasKind.DENSE:
        scores = b.op("Add", scores, b.op("Cast", "bias", to=compute), name="scores_biased")
    p = b.op("Softmax", scores, axis=-1, name="probabilities")
    if grouped:
        p = b.op("Reshape", p, by_group, name="probabilities")
    o = b.op("MatMul", p, to_bhsd(b, v, variant.v, variant.num_kv_heads), name="values")
    if grouped:
        o = b.op("Reshape", o, by_head, name="values")
    if variant.zero_rows:
        zero = b.const(0, onnx.helper.tensor_dtype_to_np_dtype(compute))
        o = b.op("Where", "row_ok", o, zero, name="values_or_zero")
    if variant.o is not Form.BHSD:
        o = b.op("Reshape", b.op("Transpose", o, perm=[0, 2, 1, 3]), b.ints(0, 0, -1))
    if variant.dtype == compute:
        b.returns("Identity", o, output="O")
    else:
        b.returns("Cast", o, output="O", to=variant.dtype)
    return b.build()


def _cast(b: FunctionBuilder, tensor: str, source: int, to: int) -> str:
    return tensor if source == to else b.op("Cast", tensor, to=to, name=tensor.lower())


def _doc(variant: AttentionVariant) -> str:
    additive = " + mask" if variant.has_mask else " + bias" if variant.bias is BiasKind.DENSE else ""
    inner = "softcap(scale * Q K^T)" if variant.softcap else "scale * Q K^T"
    rows = "; rows that see no key are zero" if variant.zero_rows else ""
    return f"O = softmax({inner}{additive}) V{rows}. The mask arrays are read by the plugin node this lowers to."
