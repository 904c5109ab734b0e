"""A small masked attention in plain operators, with ids, key padding and a dynamic sequence."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB, HEADS, HEAD = 37, 2, 8
HIDDEN = HEADS * HEAD


def attention(dtype: type = np.float32, padding: bool = True, flaw: str = "") -> onnx.ModelProto:
    """softmax(q k^T / sqrt(d)) v over embedded ids [batch, sequence], causal by a [64, 64] table, padded at run time.

    Args:
        flaw: "mask" lets one query see one key too many; "scale" multiplies the scores by 1.001.
    """
    rng = np.random.default_rng(5)
    dtype_ = np.dtype(dtype)
    nodes: list[onnx.NodeProto] = []
    tensors: list[onnx.TensorProto] = []

    def const(name: str, value: np.ndarray) -> str:
        tensors.append(numpy_helper.from_array(value, name))
        return name

    def op(kind: str, *inputs: str, output: str = "", **attributes: object) -> str:
        output = output or f"{kind.lower()}_{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def ints(name: str, *values: int) -> str:
        return const(name, np.array(values, np.int64))

    x = op("Gather", const("table", rng.standard_normal((VOCAB, HIDDEN)).astype(dtype_)), "ids")
    split = ints("split", 0, 0, HEADS, HEAD)
    heads = []
    for name, perm in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3))):
        weight = const(f"w{name}", (rng.standard_normal((HIDDEN, HIDDEN)) / HIDDEN**0.5).astype(dtype_))
        heads.append(op("Transpose", op("Reshape", op("MatMul", x, weight), split), perm=list(perm)))
    scale = HEAD**-0.5 * (1.001 if flaw == "scale" else 1)
    scores = op("Mul", op("MatMul", heads[0], heads[1]), const("scale", np.array(scale, dtype_)))
    causal = np.tril(np.ones((1, 1, 64, 64), bool))
    if flaw == "mask":
        causal[0, 0, 20, 21] = True
    length = op("Gather", op("Shape", "ids"), ints("one", 1), axis=0)
    zero = ints("zero", 0)
    rows = op("Slice", const("causal", causal), zero, length, ints("axis_q", 2))
    visible = op("Slice", rows, zero, length, ints("axis_k", 3))
    lowest = const("lowest", np.array(ml_dtypes.finfo(dtype_).min, dtype_))
    scores = op("Where", visible, scores, lowest)
    if padding:
        keys = op("Unsqueeze", "attention_mask", ints("axes", 1, 2))
        scores = op("Where", op("Cast", keys, to=TensorProto.BOOL), scores, lowest)
    out = op("MatMul", op("Softmax", scores, axis=-1), heads[2], output="context")
    flat = ints("flat", 0, 0, HIDDEN)
    op("Reshape", op("Transpose", out, perm=[0, 2, 1, 3]), flat, output="y")
    onnx_type = helper.np_dtype_to_tensor_dtype(dtype_)
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])]
    if padding:
        inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "sequence"]))
    graph = helper.make_graph(
        nodes,
        "attention",
        inputs,
        [helper.make_tensor_value_info("y", onnx_type, ["batch", "sequence", HIDDEN])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
