"""What an AttentionMatch claims, in float64, beside what the model computes: the judge of every matching test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper
from onnx.reference import ReferenceEvaluator
from stof_onnx.attention.match import UNREADABLE, find_attention
from stof_onnx.attention.types import AttentionMatch, BiasKind, KvKind, Layout, MaskedRow, Refusal
from stof_onnx.graph.inputs import apply_shapes
from stof_onnx.graph.model import LoadedModel, load_model
from stof_onnx.mask import decode
from stof_onnx.options import OptimizeOptions, parse_shapes


@dataclass(frozen=True)
class Found:
    """A loaded model and what was found in it."""

    path: Path
    model: LoadedModel
    matches: list[AttentionMatch]
    refusals: list[Refusal]

    @property
    def only(self) -> AttentionMatch:
        assert not self.refusals, self.refusals
        (match,) = self.matches
        return match

    @property
    def refused(self) -> Refusal:
        assert not self.matches, self.matches
        (refusal,) = self.refusals
        return refusal


def find(model: onnx.ModelProto | Path, folder: Path, shapes: tuple[str, ...] = (), assume: bool = False) -> Found:
    """Saves (where it is not a file yet), loads and searches a model."""
    path = model if isinstance(model, Path) else folder / "model.onnx"
    if isinstance(model, onnx.ModelProto):
        onnx.save(model, path)
    loaded = load_model(path)
    options = OptimizeOptions(shapes=parse_shapes(shapes), assume_no_empty_rows=assume)
    apply_shapes(loaded, options.shapes)
    found = Found(path, loaded, *find_attention(loaded, options))
    for refusal in found.refusals:
        assert not refusal.reason.startswith(UNREADABLE), refusal
    return found


def run(path: Path, feeds: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """Values of any tensors of the main graph, from ONNX Runtime without graph optimizations.

    Models in half precision run in the ONNX reference evaluator: ONNX Runtime computes them in float32 on a CPU, where
    added mask constants mean something else.
    """
    proto = onnx.load(path)
    present = {o.name for o in proto.graph.output} | {i.name for i in proto.graph.input}
    initializers = {i.name: onnx.numpy_helper.to_array(i) for i in proto.graph.initializer}
    wanted = [n for n in dict.fromkeys(names) if n not in feeds and n not in initializers]
    proto.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in wanted if n not in present)
    half = onnx.TensorProto.FLOAT16 in (
        {i.type.tensor_type.elem_type for i in proto.graph.input} | {i.data_type for i in proto.graph.initializer}
    )
    if half:
        with np.errstate(all="ignore"):
            values = ReferenceEvaluator(proto).run(wanted, feeds)
        return {**feeds, **initializers, **dict(zip(wanted, values, strict=True))}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    for function in proto.functions:
        assert function.domain != "stof"
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    used = {i.name for i in session.get_inputs()}
    values = session.run(wanted, {k: v for k, v in feeds.items() if k in used}) if wanted else []
    return {**feeds, **initializers, **dict(zip(wanted, values, strict=True))}


def as_bhsd(array: np.ndarray, layout: Layout, heads: int) -> np.ndarray:
    if layout is Layout.BHSD:
        return array
    return array.reshape(*array.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def expected(match: AttentionMatch, values: dict[str, np.ndarray]) -> np.ndarray:
    """The output in its own layout, computed from Q, K, V, run-time padding and bias as the match describes it."""
    q = as_bhsd(values[match.q.name].astype(np.float64), match.q_layout, match.num_heads)
    k = as_bhsd(values[match.k.name].astype(np.float64), match.k_layout, match.num_kv_heads)
    v = as_bhsd(values[match.v.name].astype(np.float64), match.v_layout, match.num_kv_heads)
    repeat = match.num_heads // match.num_kv_heads
    k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
    s_q, s_kv = q.shape[2], k.shape[2]
    assert q.shape[3] == match.head_dim and v.shape[3] == match.v_head_dim
    raw = q @ k.swapaxes(2, 3) * match.scale
    scores = match.softcap * np.tanh(raw / match.softcap) if match.softcap else raw
    allowed = np.ones((1, 1, s_q, s_kv), bool)
    if match.mask is not None:
        dense = decode(match.mask)
        index = match.mask.mask_index
        if dense.ndim == 2:
            dense = dense[None, None]
        allowed = np.broadcast_to(dense, (*index.shape, *dense.shape[2:]))[:, :, :s_q, :s_kv]
    if match.kv_mask.kind is KvKind.MASK:
        assert match.kv_mask.tensor is not None
        attend = (values[match.kv_mask.tensor.name] != 0) ^ match.kv_mask.invert
        allowed = allowed & attend.reshape(len(q), 1, 1, s_kv)
    hidden = np.zeros(1, bool)
    if match.bias.kind is BiasKind.RELATIVE:
        assert match.bias.array is not None
        entry = np.arange(s_kv) - np.arange(s_q)[:, None] + match.bias.rel_rq - 1
        scores = scores + match.bias.array.astype(np.float64)[:, entry]
    elif match.bias.kind is BiasKind.DENSE:
        tensor = match.bias.tensor
        bias = values[tensor.name] if tensor is not None else match.bias.array
        assert bias is not None
        if bias.dtype == np.bool_:
            bias = np.where(bias, 0.0, -np.inf)
        bias = bias.astype(np.float64)[..., :s_q, :s_kv]
        scores = scores + bias
        hidden = np.isneginf(bias)
    allowed = np.broadcast_to(allowed & ~hidden, scores.shape)
    whole = np.exp(scores - scores.max(-1, keepdims=True))
    scores = np.where(allowed, scores, -np.inf)
    empty = ~allowed.any(-1, keepdims=True)
    top = np.where(empty, 0.0, scores.max(-1, keepdims=True))
    weights = np.exp(scores - top)
    with np.errstate(invalid="ignore"):
        weights = weights / weights.sum(-1, keepdims=True)
    if match.masked_row is MaskedRow.ZERO:
        weights = np.where(empty, 0.0, weights)
    elif match.masked_row is MaskedRow.MEAN:
        weights = np.where(empty, 1.0 / s_kv, weights)
    elif match.masked_row is MaskedRow.SCORES:
        weights = np.where(empty, whole / whole.sum(-1, keepdims=True), weights)
    out = weights @ v
    if match.o_layout is Layout.BHSD:
        return out
    rows = out.transpose(0, 2, 1, 3).reshape(len(out), s_q, -1)
    return rows.reshape(-1, rows.shape[2]) if match.output_rank == 2 else rows


def check(found: Found, feeds: dict[str, np.ndarray], rtol: float = 2e-5, atol: float = 2e-5) -> None:
    """Every match of the main graph computes its output from its inputs."""
    tensors: list[str] = []
    for match in found.matches:
        made = {t.name for node in match.prelude for t in node.outputs}
        tensors += [t.name for t in (match.q, match.k, match.v, match.output) if t.name not in made]
        tensors += [t.name for node in match.prelude for t in node.inputs]
        tensors += [t.name for t in (match.kv_mask.tensor, match.bias.tensor) if t is not None]
    values = run(found.path, feeds, tensors)
    for match in found.matches:
        for node in match.prelude:
            assert node.op == "Cast"
            values[node.outputs[0].name] = values[node.inputs[0].name].astype(match.dtype)
        actual = values[match.output.name].astype(np.float64)
        np.testing.assert_allclose(actual, expected(match, values), rtol=rtol, atol=atol, err_msg=match.name)
