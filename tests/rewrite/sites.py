"""Models with one placeholder node an attention, the matches that describe them, and a float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from stof_onnx.attention.types import AttentionMatch, BiasKind, BiasTerm, KvKind, KvMask, Layout, MaskedRow
from stof_onnx.graph.model import LoadedModel, import_model
from stof_onnx.mask import encode


@dataclass(frozen=True)
class Case:
    """One attention. `allowed` is bool [B or 1, H or 1, Sq, Skv] or None; `bias` the array of `bias_kind`."""

    batch: int = 2
    heads: int = 3
    kv_heads: int = 3
    seq_q: int = 20
    seq_kv: int = 20
    dim: int = 8
    v_dim: int = 8
    layouts: tuple[str, str, str, str] = ("BHSD", "BHSD", "BHSD", "BHSD")
    rank: int = 4  # of inputs in BSHD
    dtype: type = np.float32
    softcap: float = 0.0
    allowed: np.ndarray | None = None
    tile: int = 16
    bias_kind: BiasKind = BiasKind.NONE
    bias: np.ndarray | None = None
    bias_at_run_time: bool = False
    rel_rq: int = 0
    kv_kind: KvKind = KvKind.NONE
    kv_dtype: type = np.int64
    kv_rank: int = 2
    invert: bool = False
    masked_row: MaskedRow = MaskedRow.ZERO
    dynamic: bool = False
    scale: float = 0.3125  # exact in float32, as the attribute is

    def shape(self, which: str) -> list[int]:
        heads = self.heads if which in "QO" else self.kv_heads
        seq = self.seq_q if which in "QO" else self.seq_kv
        dim = self.v_dim if which in "VO" else self.dim
        if self.layouts["QKVO".index(which)] == "BHSD":
            return [self.batch, heads, seq, dim]
        if self.rank == 3 or which == "O":
            return [self.batch, seq, heads * dim]
        return [self.batch, seq, heads, dim]

    def declared_shape(self, which: str) -> list[int | str]:
        shape: list[int | str] = list(self.shape(which))
        if self.dynamic:
            shape[0] = "batch"
            axis = 2 if self.layouts["QKVO".index(which)] == "BHSD" else 1
            shape[axis] = "seq_q" if which in "QO" else "seq_kv"
        return shape


def build(cases: Sequence[Case], path: Path, opset: int = 17) -> tuple[LoadedModel, list[AttentionMatch]]:
    """A loaded model with inputs q0, k0, v0, (bias0), (kv0) and output o0 for case 0, and so on."""
    nodes, inputs, outputs = [], [], []
    for i, case in enumerate(cases):
        names = [f"q{i}", f"k{i}", f"v{i}"]
        dtype = helper.np_dtype_to_tensor_dtype(np.dtype(case.dtype))
        inputs += [
            helper.make_tensor_value_info(n, dtype, case.declared_shape(w)) for n, w in zip(names, "QKV", strict=True)
        ]
        if case.bias_at_run_time:
            names.append(f"bias{i}")
            bias_dtype = helper.np_dtype_to_tensor_dtype(case.bias.dtype)
            inputs.append(helper.make_tensor_value_info(names[-1], bias_dtype, case.bias.shape))
        if case.kv_kind is not KvKind.NONE:
            names.append(f"kv{i}")
            shape = [case.batch, case.seq_kv] if case.kv_kind is KvKind.MASK else [case.batch]
            shape = ["batch", "seq_kv"][: len(shape)] if case.dynamic else shape
            shape = shape if case.kv_rank == 2 else [shape[0], 1, 1, shape[1]]
            kv_dtype = helper.np_dtype_to_tensor_dtype(np.dtype(case.kv_dtype))
            inputs.append(helper.make_tensor_value_info(names[-1], kv_dtype, shape))
        nodes.append(helper.make_node("Placeholder", names, [f"core{i}"], f"site{i}", domain="test"))
        nodes.append(helper.make_node("Identity", [f"core{i}"], [f"o{i}"], f"after{i}"))
        outputs.append(helper.make_tensor_value_info(f"o{i}", dtype, case.declared_shape("O")))
    graph = helper.make_graph(nodes, "sites", inputs, outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("test", 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=8)
    model = import_model(proto, path, opset, [])
    return model, [_match(model, case, i) for i, case in enumerate(cases)]


def _match(model: LoadedModel, case: Case, i: int) -> AttentionMatch:
    tensors = model.graph.tensors()
    bias = BiasTerm(case.bias_kind, rel_rq=case.rel_rq)
    if case.bias is not None:
        at_run_time = case.bias_at_run_time
        array, tensor = (None, tensors[f"bias{i}"]) if at_run_time else (case.bias, None)
        bias = BiasTerm(case.bias_kind, array, tensor, case.rel_rq)
    kv = KvMask(case.kv_kind, tensors.get(f"kv{i}"), case.invert)
    return AttentionMatch(
        name=f"site{i}",
        graph=model.graph,
        q=tensors[f"q{i}"],
        k=tensors[f"k{i}"],
        v=tensors[f"v{i}"],
        output=tensors[f"core{i}"],
        q_layout=Layout(case.layouts[0]),
        k_layout=Layout(case.layouts[1]),
        v_layout=Layout(case.layouts[2]),
        o_layout=Layout(case.layouts[3]),
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.dim,
        v_head_dim=case.v_dim,
        seq_q=case.seq_q if case.allowed is None else case.allowed.shape[-2],
        seq_kv=case.seq_kv if case.allowed is None else case.allowed.shape[-1],
        dynamic_seq=case.dynamic,
        dtype=np.dtype(case.dtype),
        scale=case.scale,
        softcap=case.softcap,
        mask=None if case.allowed is None else encode(case.allowed, case.tile, case.tile),
        bias=bias,
        kv_mask=kv,
        masked_row=case.masked_row,
        nodes=tuple(n for n in model.graph.nodes if n.name == f"site{i}"),
    )


@dataclass
class Feeds:
    """Random inputs of one case; `kv_ok` is bool [B, Skv]."""

    by_name: dict[str, np.ndarray] = field(default_factory=dict)
    kv_ok: np.ndarray | None = None


def feeds(case: Case, i: int, rng: np.random.Generator) -> Feeds:
    """Random Q, K, V and run-time padding; some batch entry may have no key at all."""
    out = Feeds()
    for which in "QKV":
        out.by_name[f"{which.lower()}{i}"] = rng.standard_normal(case.shape(which)).astype(case.dtype)
    if case.bias_at_run_time:
        out.by_name[f"bias{i}"] = case.bias
    if case.kv_kind is KvKind.LENGTH:
        lengths = rng.integers(0, case.seq_kv + 1, case.batch)
        lengths[0] = case.seq_kv // 2
        out.by_name[f"kv{i}"] = lengths.astype(case.kv_dtype)
        out.kv_ok = np.arange(case.seq_kv) < lengths[:, None]
    elif case.kv_kind is KvKind.MASK:
        out.kv_ok = rng.random((case.batch, case.seq_kv)) < 0.6
        out.kv_ok[-1] = False
        padding = (out.kv_ok ^ case.invert).astype(case.kv_dtype)
        out.by_name[f"kv{i}"] = padding if case.kv_rank == 2 else padding[:, None, None]
    return out


def reference(case: Case, i: int, given: Feeds) -> np.ndarray:
    """The node contract in float64, written from its definition: row by row over the allowed keys."""
    q, k, v = (_bhsd(case, w, given.by_name[f"{w.lower()}{i}"]) for w in "QKV")
    group = case.heads // case.kv_heads
    allowed = np.ones((1, 1, case.seq_q, case.seq_kv), bool)
    if case.allowed is not None:
        allowed = case.allowed[:, :, : case.seq_q, : case.seq_kv]
    shape = (case.batch, case.heads, case.seq_q, case.seq_kv)
    allowed = np.broadcast_to(allowed, shape).copy()
    if given.kv_ok is not None:
        allowed &= given.kv_ok[:, None, None, :]
    bias = np.broadcast_to(_bias(case), shape)
    out = np.empty((case.batch, case.heads, case.seq_q, case.v_dim))
    for b, h, row in np.ndindex(*shape[:3]):
        keys, values = k[b, h // group], v[b, h // group]
        scores = case.scale * (keys @ q[b, h, row])
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        scores = scores + bias[b, h, row]
        seen = allowed[b, h, row]
        if case.masked_row is not MaskedRow.SCORES:
            seen = seen & ~np.isneginf(bias[b, h, row])
        if not seen.any():
            if case.masked_row is MaskedRow.SCORES:
                seen = np.ones_like(seen)
            else:
                fixed = {MaskedRow.ZERO: 0.0, MaskedRow.NAN: np.nan, MaskedRow.MEAN: values.mean(0)}
                out[b, h, row] = fixed[case.masked_row]
                continue
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores[seen] - scores[seen].max())
        out[b, h, row] = weights @ values[seen] / weights.sum()
    if case.layouts[3] == "BHSD":
        return out
    return out.transpose(0, 2, 1, 3).reshape(case.batch, case.seq_q, -1)


def _bhsd(case: Case, which: str, array: np.ndarray) -> np.ndarray:
    heads = case.heads if which == "Q" else case.kv_heads
    array = array.astype(np.float64)
    if case.layouts["QKVO".index(which)] == "BHSD":
        return array
    return array.reshape(case.batch, array.shape[1], heads, -1).transpose(0, 2, 1, 3)


def _bias(case: Case) -> np.ndarray:
    if case.bias_kind is BiasKind.NONE:
        return np.zeros((1, 1, 1, 1))
    if case.bias_kind is BiasKind.DENSE:
        bias = np.where(case.bias, 0.0, -np.inf) if case.bias.dtype == bool else case.bias.astype(np.float64)
        missing = case.seq_kv - bias.shape[-1]
        return np.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, missing)], constant_values=-np.inf)
    q, k = np.arange(case.seq_q)[:, None], np.arange(case.seq_kv)
    return case.bias.astype(np.float64)[None, :, k - q + case.rel_rq - 1]


def nodes_of(proto: onnx.ModelProto, prefix: str) -> list[onnx.NodeProto]:
    """The main graph's nodes whose operator starts with `prefix`."""
    return [n for n in proto.graph.node if n.op_type.startswith(prefix)]
