"""ONNX `Attention` (opset 23 and newer) as an AttentionMatch.

The text of versions 23 and 24 was corrected in place after onnx 1.19, so that two readings are about:

    what                            onnx 1.19's reference    later releases, ONNX Runtime 1.32
    softcap beside a mask           after the mask           before the mask (so in version 25 from the start)
    a row that sees no key          NaN                      zeros
    is_causal with nonpad_kv_seqlen k <= q                   k <= q + nonpad_kv_seqlen - S_q

Where the readings differ at run time the operator is left alone, except that rows without keys yield zeros: NaN is
of no use to anyone, and runtimes give zeros. Without past keys is_causal is k <= q (upper left) in all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper
from stof_onnx.attention.fused_ops.site import FusedSite, Refused
from stof_onnx.attention.fused_ops.window import encode_window, window_runs
from stof_onnx.attention.recover import recover
from stof_onnx.attention.types import (
    AttentionMatch,
    BiasKind,
    BiasTerm,
    KvKind,
    KvMask,
    Layout,
    MaskedRow,
    Recovered,
    Refusal,
    ScoreSite,
    ScoreTerm,
)

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder

_SOFTCAP_FIRST = 25  # the first version whose every reading applies softcap before the mask


def match_onnx_attention(site: FusedSite) -> AttentionMatch | Refusal:
    """Reads one `Attention` node: inputs Q, K, V, attn_mask, past_key, past_value, nonpad_kv_seqlen.

    Raises:
        Refused: the node is not a StofAttention.
    """
    sizes = _Sizes.of(site)
    if site.input(4) is not None or site.input(5) is not None:
        raise Refused("past keys and values (KV cache): decoding is left to the runtime")
    site.refuse_outputs(present_key=1, present_value=2, qk_matmul_output=3)
    _softmax_dtype(site, sizes)
    softcap = site.attribute("softcap", 0.0)
    mask, lengths = site.input(3), site.input(6)
    causal, left, right = _window(site)
    windowed = causal or left >= 0 or right >= 0
    if softcap and (mask is not None or windowed or lengths is not None) and site.version("") < _SOFTCAP_FIRST:
        raise Refused("softcap beside a mask: releases of onnx disagree on the order of the two in versions 23 and 24")
    if windowed and lengths is not None:
        raise Refused(
            "is_causal or a window beside nonpad_kv_seqlen: releases of onnx disagree on where the row starts"
        )
    recovered = _mask(site, sizes, mask, (left, 0 if causal else right) if windowed else None)
    if isinstance(recovered, Refusal):
        return recovered
    kv_mask = recovered.kv_mask
    if lengths is not None:
        if kv_mask.kind is not KvKind.NONE:
            raise Refused("run-time padding by attn_mask and by nonpad_kv_seqlen at once")
        if recovered.masked_row is not MaskedRow.ZERO and recovered.mask is not None:
            raise Refused("attn_mask hides keys by finite numbers, nonpad_kv_seqlen by -inf: empty rows mix both")
        kv_mask = KvMask(KvKind.LENGTH, lengths)
    q, k, v = site.node.inputs[:3]
    return AttentionMatch(
        name=site.name,
        graph=site.graph,
        q=q,
        k=k,
        v=v,
        output=site.node.outputs[0],
        q_layout=sizes.layout,
        k_layout=sizes.layout,
        v_layout=sizes.layout,
        o_layout=sizes.layout,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        v_head_dim=sizes.v_dim,
        seq_q=0 if sizes.unbounded else sizes.seq_q,
        seq_kv=0 if sizes.unbounded else sizes.seq_kv,
        dynamic_seq=sizes.dynamic_seq,
        dtype=sizes.dtype,
        scale=site.attribute("scale", 1 / math.sqrt(sizes.dim)) * recovered.scale_factor,
        softcap=softcap,
        mask=recovered.mask,
        bias=recovered.bias,
        kv_mask=kv_mask,
        masked_row=recovered.masked_row,
        nodes=(site.node,),
        ranks=(sizes.rank, sizes.rank, sizes.rank),
        notes=recovered.notes,
        score_bound=recovered.score_bound,
    )


@dataclass(frozen=True)
class _Sizes:
    rank: int
    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    dim: int
    v_dim: int
    dtype: np.dtype
    dynamic_seq: bool
    unbounded: bool
    probes: tuple[tuple[int, int, int, int], ...]

    @property
    def layout(self) -> Layout:
        return Layout.BHSD if self.rank == 4 else Layout.BSHD

    @classmethod
    def of(cls, site: FusedSite) -> _Sizes:
        q, k, v = site.node.inputs[:3]
        shapes = [site.shape(t) for t in (q, k, v)]
        rank = len(shapes[0])
        if rank == 4:
            heads, kv_heads = shapes[0][1], shapes[1][1]
            dims = [shape[3] for shape in shapes]
        else:
            heads, kv_heads = site.integer("q_num_heads", 0), site.integer("kv_num_heads", 0)
            if rank != 3 or heads < 1 or kv_heads < 1:
                raise Refused("Q has neither rank 4 nor rank 3 with q_num_heads and kv_num_heads")
            dims = [shape[2] // n for shape, n in zip(shapes, (heads, kv_heads, kv_heads), strict=True)]
        if heads % kv_heads:
            raise Refused(f"{heads} query heads do not share {kv_heads} key heads evenly")
        axis = 2 if rank == 4 else 1
        return cls(
            rank=rank,
            batch=shapes[0][0],
            heads=heads,
            kv_heads=kv_heads,
            seq_q=shapes[0][axis],
            seq_kv=shapes[1][axis],
            dim=dims[0],
            v_dim=dims[2],
            dtype=site.dtype(q),
            dynamic_seq=site.is_dynamic(q, axis) or site.is_dynamic(k, axis),
            unbounded=site.is_unbounded(q, axis) or site.is_unbounded(k, axis),
            probes=tuple(cls._at(q, k, axis, heads, probe) for probe in site.others),
        )

    @staticmethod
    def _at(q: gs.Tensor, k: gs.Tensor, axis: int, heads: int, probe: Folder) -> tuple[int, int, int, int]:
        """B, H, S_q and S_kv at other sizes."""
        q_shape, k_shape = probe.shape(q), probe.shape(k)
        if q_shape is None or k_shape is None:
            raise Refused("the sizes of Q and K are not known at other sizes of the input")
        return q_shape[0], heads, q_shape[axis], k_shape[axis]


def _window(site: FusedSite) -> tuple[bool, int, int]:
    """is_causal, and the window of version 25 (-1: no bound)."""
    return (
        bool(site.integer("is_causal", 0)),
        site.integer("left_window_size", -1),
        site.integer("right_window_size", -1),
    )


def _mask(
    site: FusedSite, sizes: _Sizes, mask: gs.Tensor | None, window: tuple[int, int] | None
) -> Recovered | Refusal:
    """attn_mask, is_causal and the window sorted into static mask, padding and bias."""
    nothing = BiasTerm(BiasKind.NONE)
    if window is not None and sizes.unbounded:
        raise Refused("is_causal with a sequence that nothing bounds (give its largest size with --shape)")
    static = encode_window(sizes.seq_q, sizes.seq_kv, *window) if window is not None else None
    if mask is None:
        return Recovered(static, nothing, KvMask(KvKind.NONE), MaskedRow.ZERO)
    keys = site.shape(mask)[-1]
    if keys == 1 < sizes.seq_kv:
        raise Refused("attn_mask has one key: releases of onnx disagree on whether the others are hidden or alike")
    shorter = keys < sizes.seq_kv
    if shorter and (site.is_dynamic(mask, -1) or sizes.dynamic_seq):
        raise Refused("attn_mask may have fewer keys than K at some sizes")
    if not shorter or site.folder.is_static(mask):
        terms = [_mask_term(site, sizes, mask, shorter)]
        if window is not None:
            terms.append(_window_term(site, sizes, window))
        scores = ScoreSite(
            name=site.name,
            batch=sizes.batch,
            heads=sizes.heads,
            seq_q=sizes.seq_q,
            seq_kv=sizes.seq_kv,
            dtype=sizes.dtype,
            softmax_dtype=_softmax_dtype(site, sizes),
            nan_guard=True,
            assume_no_empty_rows=site.assume_no_empty_rows,
            probe_sizes=sizes.probes,
        )
        recovered = recover(tuple(terms), scores, site.folder)
        if isinstance(recovered, Recovered) or site.folder.is_static(mask):
            return recovered
    # A run-time mask of no special form is a dense bias. The operator adds it in the type of Q and K.
    bias, notes = site.dense_bias(mask, sizes.dtype, alone=window is None)
    return Recovered(static, bias, KvMask(KvKind.NONE), MaskedRow.ZERO, notes=notes)


def _softmax_dtype(site: FusedSite, sizes: _Sizes) -> np.dtype:
    precision = site.integer("softmax_precision", 0)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(precision)) if precision else sizes.dtype
    if dtype == np.float64 != sizes.dtype:
        raise Refused("softmax_precision asks for float64")
    return dtype


def _mask_term(site: FusedSite, sizes: _Sizes, mask: gs.Tensor, shorter: bool) -> ScoreTerm:
    """attn_mask: bool (True = attend), or numbers to be added. Missing keys are hidden."""
    is_bool = site.dtype(mask) == np.bool_
    kind, fill = ("where", -math.inf) if is_bool else ("add", None)
    if not shorter:
        return ScoreTerm(kind, sizes.dtype, tensor=mask, fill=fill, node=site.node)

    def padded(batch: int, heads: int, seq_q: int, seq_kv: int) -> np.ndarray:
        value = site.folder.value(mask)
        assert value is not None, "checked by the caller: the mask is static"
        missing = [(0, 0)] * (value.ndim - 1) + [(0, seq_kv - value.shape[-1])]
        return np.pad(value, missing, constant_values=False if is_bool else -math.inf)

    return ScoreTerm(kind, sizes.dtype, build=padded, fill=fill, node=site.node)


def _window_term(site: FusedSite, sizes: _Sizes, window: tuple[int, int]) -> ScoreTerm:
    def inside(batch: int, heads: int, seq_q: int, seq_kv: int) -> np.ndarray:
        start, stop = window_runs(seq_q, seq_kv, *window)
        key = np.arange(seq_kv)
        return (key >= start[:, None]) & (key < stop[:, None])

    return ScoreTerm("where", sizes.dtype, build=inside, fill=-math.inf, node=site.node, stable=True)
