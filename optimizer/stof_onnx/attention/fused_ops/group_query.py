"""com.microsoft `GroupQueryAttention` as an AttentionMatch: a whole prompt at once, without a cache.

ONNX Runtime caps before it adds attention_bias, and local_window_size is the number of keys that a query sees, its own
included. Rows past a sequence's length hold whatever the provider left there, so lengths must be static and full.
"""

from __future__ import annotations

import math

import numpy as np
from stof_onnx.attention.fused_ops.site import FusedSite, Refused
from stof_onnx.attention.fused_ops.window import encode_window
from stof_onnx.attention.types import AttentionMatch, Layout, MaskedRow, NewNode, Refusal


def match_group_query_attention(site: FusedSite) -> AttentionMatch | Refusal:
    """Reads query, key, value, past_key, past_value, seqlens_k, total_sequence_length, ..., attention_bias.

    Raises:
        Refused: the node is not a StofAttention.
    """
    site.refuse_inputs(past_key=3, past_value=4)
    site.refuse_inputs(head_sink=11, k_scale=12, v_scale=13, q_norm_weight=14, k_norm_weight=15, query_seqlens=16)
    site.refuse_outputs(present_key=1, present_value=2, output_qk=3)
    for name in ("do_rotary", "smooth_softmax", "sliding_window_cache"):
        if site.integer(name, 0) > 0:
            raise Refused(f"attribute {name} is set")
    heads, kv_heads = site.integer("num_heads", 0), site.integer("kv_num_heads", 0)
    query, key, value = site.node.inputs[0], site.input(1), site.input(2)
    shape = site.shape(query)
    seq = shape[1]
    prelude: tuple[NewNode, ...] = ()
    if key is None or value is None:
        dim = shape[2] // (heads + 2 * kv_heads)
        sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
        split, (query, key, value) = site.split(query, sizes, ("query", "key", "value"))
        prelude, v_dim = (split,), dim
    else:
        dim, v_dim = shape[2] // heads, site.shape(value)[2] // kv_heads
        if site.shape(key)[1] != seq:
            raise Refused("query and key differ in length")
    if site.is_dynamic(site.node.inputs[0], 1):
        raise Refused("the sequence is dynamic: seqlens_k then says at run time which rows count")
    _check_lengths(site, seq)
    causal = site.integer("causal", 1)
    window = site.integer("local_window_size", -1)
    dtype = site.dtype(site.node.inputs[0])
    bias, notes = site.dense_bias(site.input(10), dtype, alone=not causal)
    mask = encode_window(seq, seq, window - 1 if window > 0 else -1, 0) if causal else None
    return AttentionMatch(
        name=site.name,
        graph=site.graph,
        q=query,
        k=key,
        v=value,
        output=site.node.outputs[0],
        q_layout=Layout.BSHD,
        k_layout=Layout.BSHD,
        v_layout=Layout.BSHD,
        o_layout=Layout.BSHD,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim,
        seq_q=seq,
        seq_kv=seq,
        dynamic_seq=False,
        dtype=dtype,
        scale=site.attribute("scale", 0.0) or 1 / math.sqrt(dim),
        softcap=site.attribute("softcap", 0.0),
        mask=mask,
        bias=bias,
        masked_row=MaskedRow.NAN,
        nodes=(site.node,),
        ranks=(3, 3, 3),
        prelude=prelude,
        notes=notes,
    )


def _check_lengths(site: FusedSite, seq: int) -> None:
    """seqlens_k must be S - 1 everywhere and total_sequence_length S: nothing cached, nothing padded."""
    for index, what, wanted in ((5, "seqlens_k", seq - 1), (6, "total_sequence_length", seq)):
        tensor = site.input(index)
        value = None if tensor is None else site.folder.value(tensor)
        if value is None:
            raise Refused(f"{what} is known only at run time")
        if not np.all(np.asarray(value) == wanted):
            raise Refused(f"{what} is not {wanted}: there is padding or a cache")
