"""com.microsoft `MultiHeadAttention` and `Attention` as an AttentionMatch.

Both add `mask_filter_value` (-10000 unless given) to the scores of hidden keys and the lowest finite number above the
diagonal. ONNX Runtime's providers disagree on where the diagonal starts when S_q differs from S_kv, so that is refused.
Projections and their biases inside the operators become standard operators ahead of the replacement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.fused_ops.site import FusedSite, Refused
from stof_onnx.attention.fused_ops.window import encode_window
from stof_onnx.attention.types import (
    AttentionMatch,
    KvKind,
    KvMask,
    Layout,
    MaskedRow,
    NewNode,
    Refusal,
)
from stof_onnx.mask import EncodedMask, encode

_LOWEST_THAT_SHIFTS = -1e6  # below it a float32 score is no longer kept beside the constant
_ABSORBS = -1e30  # below it any score vanishes beside the constant


@dataclass(frozen=True)
class _Operands:
    """Q, K and V where they are (or will be, after `prelude`), with the sizes of their axes."""

    tensors: tuple[gs.Tensor, gs.Tensor, gs.Tensor]
    layouts: tuple[Layout, Layout, Layout]
    ranks: tuple[int, int, int]
    dim: int
    v_dim: int
    seq_kv: int
    keys: tuple[gs.Tensor, int]  # the tensor and axis whose size S_kv is
    prelude: tuple[NewNode, ...] = ()


def match_multi_head_attention(site: FusedSite) -> AttentionMatch | Refusal:
    """Reads query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value, ...

    Raises:
        Refused: the node is not a StofAttention.
    """
    site.refuse_inputs(past_key=6, past_value=7, past_sequence_length=8, cache_indirection=9)
    site.refuse_outputs(present_key=1, present_value=2, qk=3)
    heads = site.integer("num_heads", 0)
    operands = _with_bias(site, _multi_head_operands(site, heads), site.input(3))
    return _match(site, heads, operands, mask=site.input(4), bias=site.input(5))


def match_microsoft_attention(site: FusedSite) -> AttentionMatch | Refusal:
    """Reads input, weights, bias, mask_index, past, attention_bias, past_sequence_length.

    Raises:
        Refused: the node is not a StofAttention.
    """
    site.refuse_inputs(past=4, past_sequence_length=6)
    site.refuse_outputs(present=1)
    if site.integer("do_rotary", 0):
        raise Refused("attribute do_rotary is set")
    heads = site.integer("num_heads", 0)
    source, weights, bias = site.node.inputs[0], site.node.inputs[1], site.input(2)
    total = site.shape(weights)[1]
    given = site.node.attrs.get("qkv_hidden_sizes")
    sizes = tuple(int(n) for n in given) if given else (total // 3,) * 3
    steps = []
    merged = site.variable("qkv")
    steps.append(NewNode("MatMul", (source, weights), (merged,)))
    if bias is not None:
        biased = site.variable("qkv_biased")
        steps.append(NewNode("Add", (merged, bias), (biased,)))
        merged = biased
    split, tensors = site.split(merged, sizes, ("query", "key", "value"))
    operands = _Operands(
        (tensors[0], tensors[1], tensors[2]),
        (Layout.BSHD,) * 3,
        (3, 3, 3),
        sizes[0] // heads,
        sizes[2] // heads,
        site.shape(source)[1],
        (source, 1),
        (*steps, split),
    )
    return _match(site, heads, operands, mask=site.input(3), bias=site.input(5))


def _multi_head_operands(site: FusedSite, heads: int) -> _Operands:
    query, key, value = site.node.inputs[0], site.input(1), site.input(2)
    shape = site.shape(query)
    if len(shape) == 5:  # [B, S, H, 3, D]
        steps, tensors = _unpack(site, query, ("query", "key", "value"))
        three = (tensors[0], tensors[1], tensors[2])
        return _Operands(three, (Layout.BSHD,) * 3, (4, 4, 4), shape[4], shape[4], shape[1], (query, 1), steps)
    if key is None:
        raise Refused("key is left out")
    dim = shape[2] // heads
    key_shape = site.shape(key)
    if len(key_shape) == 5:  # [B, L, H, 2, D]
        steps, tensors = _unpack(site, key, ("key", "value"))
        three, v_dim, seq = (query, tensors[0], tensors[1]), key_shape[4], key_shape[1]
        return _Operands(three, (Layout.BSHD,) * 3, (3, 4, 4), dim, v_dim, seq, (key, 1), steps)
    if value is None:
        raise Refused("value is left out")
    if len(key_shape) == 4:  # [B, H, L, D]
        layouts = (Layout.BSHD, Layout.BHSD, Layout.BHSD)
        v_dim = site.shape(value)[3]
        return _Operands((query, key, value), layouts, (3, 4, 4), dim, v_dim, key_shape[2], (key, 2))
    v_dim = site.shape(value)[2] // heads
    return _Operands((query, key, value), (Layout.BSHD,) * 3, (3, 3, 3), dim, v_dim, key_shape[1], (key, 1))


def _unpack(site: FusedSite, packed: gs.Tensor, names: tuple[str, ...]) -> tuple[tuple[NewNode, ...], list[gs.Tensor]]:
    """The slices of axis 3 of a [B, S, H, n, D] tensor."""
    tensors: list[gs.Tensor] = [site.variable(name) for name in names]
    steps = tuple(
        NewNode("Gather", (packed, gs.Constant("index", np.array(i, np.int64))), (tensor,), {"axis": 3})
        for i, tensor in enumerate(tensors)
    )
    return steps, tensors


def _with_bias(site: FusedSite, operands: _Operands, bias: gs.Tensor | None) -> _Operands:
    """Adds the projection bias [Hq*D + Hk*D + Hv*Dv] to Q, K and V, where it is not zero."""
    if bias is None:
        return operands
    values = site.folder.value(bias)
    if values is None:
        raise Refused("the projection bias is known only at run time")
    heads = site.integer("num_heads", 0)
    widths = (heads * operands.dim, heads * operands.dim, heads * operands.v_dim)
    steps, tensors = list(operands.prelude), list(operands.tensors)
    for i, part in enumerate(np.split(np.asarray(values), np.cumsum(widths)[:-1])):
        if not np.any(part):
            continue
        rank, layout = operands.ranks[i], operands.layouts[i]
        if rank == 4:
            per_head = part.reshape(heads, -1)
            part = per_head[:, None, :] if layout is Layout.BHSD else per_head
        biased = site.variable(f"{'qkv'[i]}_biased")
        steps.append(NewNode("Add", (tensors[i], gs.Constant("projection_bias", np.array(part, order="C"))), (biased,)))
        tensors[i] = biased
    return replace(operands, tensors=(tensors[0], tensors[1], tensors[2]), prelude=tuple(steps))


def _match(
    site: FusedSite, heads: int, operands: _Operands, mask: gs.Tensor | None, bias: gs.Tensor | None
) -> AttentionMatch:
    query = site.node.inputs[0]
    batch, seq_q = site.shape(query)[:2]
    causal = bool(site.integer("unidirectional", 0))
    dynamic = site.is_dynamic(query, 1) or site.is_dynamic(*operands.keys)
    unbounded = site.is_unbounded(query, 1) or site.is_unbounded(*operands.keys)
    if causal and not _equally_long(site, query, operands):
        raise Refused("unidirectional with S_q other than S_kv: providers disagree on where the diagonal starts")
    if causal and site.is_unbounded(query, 1):
        raise Refused("unidirectional with a sequence that nothing bounds (give its largest size with --shape)")
    dtype = site.dtype(query)
    term, notes = site.dense_bias(bias, dtype, alone=mask is None and not causal)
    static, kv_mask, row, bound = _padding(site, mask, batch, seq_q, operands.seq_kv, causal, dynamic)
    return AttentionMatch(
        name=site.name,
        graph=site.graph,
        q=operands.tensors[0],
        k=operands.tensors[1],
        v=operands.tensors[2],
        output=site.node.outputs[0],
        q_layout=operands.layouts[0],
        k_layout=operands.layouts[1],
        v_layout=operands.layouts[2],
        o_layout=Layout.BSHD,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=operands.dim,
        v_head_dim=operands.v_dim,
        seq_q=0 if unbounded else seq_q,
        seq_kv=0 if unbounded else operands.seq_kv,
        dynamic_seq=dynamic,
        dtype=dtype,
        scale=site.attribute("scale", 0.0) or 1 / math.sqrt(operands.dim),
        mask=static,
        bias=term,
        kv_mask=kv_mask,
        masked_row=row,
        nodes=(site.node,),
        ranks=operands.ranks,
        prelude=operands.prelude,
        notes=notes,
        score_bound=bound,
    )


def _equally_long(site: FusedSite, query: gs.Tensor, operands: _Operands) -> bool:
    """Whether S_q is S_kv at every size looked at."""
    keys, axis = operands.keys
    shapes = [(f.shape(query), f.shape(keys)) for f in (site.folder, *site.others)]
    return all(q is not None and k is not None and q[1] == k[axis] for q, k in shapes)


def _padding(
    site: FusedSite, mask: gs.Tensor | None, batch: int, seq_q: int, seq_kv: int, causal: bool, dynamic: bool
) -> tuple[EncodedMask | None, KvMask, MaskedRow, float]:
    """Static mask, run-time padding, what empty rows yield, and the score bound of the fill value."""
    nothing = KvMask(KvKind.NONE)
    diagonal = encode_window(seq_q, seq_kv, -1, 0) if causal else None
    if mask is None:
        return diagonal, nothing, MaskedRow.NAN, math.inf
    fill = site.attribute("mask_filter_value", -10000.0)
    if fill > -1e4:
        raise Refused(f"mask_filter_value {fill:g} does not hide a key for certain")
    if site.dtype(site.node.inputs[0]) != np.float32:
        raise Refused("a padding mask in half precision: the sum of fill value and score is not kept")
    if _ABSORBS < fill < _LOWEST_THAT_SHIFTS:
        raise Refused(f"mask_filter_value {fill:g} keeps only part of a score in a row without keys")
    row = MaskedRow.MEAN if fill <= _ABSORBS else MaskedRow.SCORES
    bound = math.inf if fill <= _ABSORBS else -fill / 2 - 60  # exp(-120) is 0 in float32
    shape = site.shape(mask)
    value = site.folder.value(mask)
    if value is not None and not dynamic:
        allowed = _allowed(np.asarray(value), shape, batch, seq_q, seq_kv)
        if site.is_dynamic(site.node.inputs[0], 0):
            if (allowed != allowed[:1]).any():
                raise Refused("a constant mask that differs between the entries of a dynamic batch")
            allowed = allowed[:1]
        if causal:
            allowed = allowed & (np.arange(seq_kv) <= np.arange(seq_q)[:, None])
        if not allowed.any(-1).all() and causal:
            raise Refused("a row sees no key: the padding's fill value and the diagonal's differ")
        return encode(np.broadcast_to(allowed, (*allowed.shape[:2], seq_q, seq_kv))), nothing, row, bound
    if causal and not site.assume_no_empty_rows:
        raise Refused(
            "unidirectional with run-time padding: a row that padding empties mixes two fill values "
            "(--assume-no-empty-rows accepts it)"
        )
    if shape == (batch, seq_kv):
        return diagonal, KvMask(KvKind.MASK, mask), row, bound
    if shape == (batch,):
        return diagonal, KvMask(KvKind.LENGTH, mask), row, bound
    raise Refused(f"a run-time mask of shape {list(shape)}")


def _allowed(value: np.ndarray, shape: tuple[int, ...], batch: int, seq_q: int, seq_kv: int) -> np.ndarray:
    """bool [B, 1, S_q or 1, S_kv] of a mask of any of the operators' static forms."""
    key = np.arange(seq_kv)
    if shape == (batch, seq_kv):
        return (value > 0)[:, None, None, :]
    if shape == (batch, seq_q, seq_kv):
        return (value > 0)[:, None]
    if shape == (batch,):
        return (key < value[:, None])[:, None, None, :]
    if shape == (2 * batch,):  # ends, then starts
        return ((key < value[:batch, None]) & (key >= value[batch:, None]))[:, None, None, :]
    raise Refused(f"a mask of shape {list(shape)}")
