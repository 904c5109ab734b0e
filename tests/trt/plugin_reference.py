"""The plugin node in float64, from the contract alone: reads the lowered arrays and attributes as the kernels do."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

MASK_INPUTS = 7


def decode_mask(arrays: list[np.ndarray], a: dict[str, Any]) -> np.ndarray:
    """bool [n_masks, mask_seq_q, mask_seq_kv]."""
    full_ptr, full_idx, part_ptr, part_idx, bitmap, row_order, _ = arrays
    rows, cols = a["mask_rows"], a["mask_cols"]
    assert full_ptr.shape == part_ptr.shape == (a["mask_n_masks"], rows + 1)
    assert row_order.shape == (a["mask_n_masks"], rows)
    out = np.zeros((a["mask_n_masks"], a["mask_seq_q"] + 1024, cols * a["tile_n"]), bool)
    words = np.ascontiguousarray(bitmap).view(np.uint32)
    for m in range(a["mask_n_masks"]):
        for r in range(rows):
            full = full_idx[full_ptr[m, r] : full_ptr[m, r + 1]]
            part = range(part_ptr[m, r], part_ptr[m, r + 1])
            if a["kernel"] == "block_sm90":
                _group(out[m], int(row_order[m, r]), full, [(int(part_idx[p]), words[p]) for p in part], a["tile_n"])
                continue
            tile_m, tile_n = a["tile_m"], a["tile_n"]
            for c in full:
                out[m, r * tile_m : (r + 1) * tile_m, c * tile_n : (c + 1) * tile_n] = True
            for p in part:
                c = part_idx[p]
                tile = (
                    _fragments(words[p], tile_m, tile_n)
                    if a["mask_fragment_order"]
                    else _tiles(words[p], tile_m, tile_n)
                )
                out[m, r * tile_m : (r + 1) * tile_m, c * tile_n : (c + 1) * tile_n] |= tile
    return out[:, : a["mask_seq_q"], : a["mask_seq_kv"]]


def _group(out: np.ndarray, order: int, full: np.ndarray, part: list[tuple[int, np.ndarray]], keys: int) -> None:
    first, bands = order & 0xFFFFF, order >> 20 & 7
    for c in full:
        out[first * 64 : (first + bands) * 64, c * keys : (c + 1) * keys] = True
    for entry, words in part:
        c = entry & 0xFFFFFF
        for band in range(bands):
            code = entry >> (24 + 2 * band) & 3
            at = slice((first + band) * 64, (first + band + 1) * 64), slice(c * keys, (c + 1) * keys)
            if code == 1:
                out[at] = True
            elif code == 2:
                out[at] |= _fragments(words[band].reshape(4, keys // 64, 32), 64, keys)


def _fragments(words: np.ndarray, tile_m: int, tile_n: int) -> np.ndarray:
    out = np.zeros((tile_m, tile_n), bool)
    for r in range(tile_m):
        for c in range(tile_n):
            row, col = r % 16, c % 64
            lane, bit = row % 8 * 4 + col % 8 // 2, 4 * (col // 8) + 2 * (row // 8) + col % 2
            out[r, c] = words[r // 16, c // 64, lane] >> np.uint32(bit) & 1
    return out


def _tiles(words: np.ndarray, tile_m: int, tile_n: int) -> np.ndarray:
    out = np.zeros((tile_m, tile_n), bool)
    for r in range(tile_m):
        for c in range(tile_n):
            bit = 8 * (r % 8) + c % 8
            out[r, c] = words[r // 8, c // 8, bit // 32] >> np.uint32(bit % 32) & 1
    return out


def attention(inputs: list[np.ndarray], a: dict[str, Any]) -> np.ndarray:
    """O of one node."""
    heads, kv_heads = a["num_heads"], a["num_kv_heads"]
    packed = a["layout"] == "packed"
    rest = list(inputs[1:] if packed else inputs[3:])
    arrays, extra = rest[:MASK_INPUTS], rest[MASK_INPUTS:]
    bias = extra.pop(0).astype(np.float64) if a["bias_kind"] != "none" else None
    kv = extra.pop(0) if a["kv_kind"] != "none" else None
    if packed:
        qkv = inputs[0].astype(np.float64)
        seq = a["seq"] if a.get("seq") else extra.pop(0).shape[1]
        widths = np.cumsum([heads * a["head_dim"], kv_heads * a["head_dim"]])
        q, k, v = (
            t.reshape(-1, seq, n, d).transpose(0, 2, 1, 3)
            for t, n, d in zip(
                np.split(qkv, widths, axis=1),
                (heads, kv_heads, kv_heads),
                (a["head_dim"], a["head_dim"], a["v_head_dim"]),
                strict=True,
            )
        )
    else:
        layouts = a["layout"].split(",") * (1 if "," in a["layout"] else 4)
        q, k, v = (
            _bhsd(t.astype(np.float64), layout, n)
            for t, layout, n in zip(inputs[:3], layouts, (heads, kv_heads, kv_heads), strict=False)
        )
    assert not extra, "every input of the node is read"
    assert (q.shape[-1], v.shape[-1]) == (a["head_dim"], a["v_head_dim"])
    o = _softmax_v(q, k, v, arrays, bias, kv, a)
    batch, _, seq_q, v_dim = o.shape
    if packed:
        return o.transpose(0, 2, 1, 3).reshape(batch * seq_q, heads * v_dim).astype(inputs[0].dtype)
    if layouts[3] == "BSHD":
        o = o.transpose(0, 2, 1, 3).reshape(batch, seq_q, heads * v_dim)
    return o.astype(inputs[0].dtype)


def _bhsd(t: np.ndarray, layout: str, heads: int) -> np.ndarray:
    if layout == "BHSD":
        return t
    return t.reshape(t.shape[0], t.shape[1], heads, -1).transpose(0, 2, 1, 3)


def _softmax_v(q, k, v, arrays, bias, kv, a) -> np.ndarray:
    heads, (batch, _, seq_q, _), seq_kv = q.shape[1], q.shape, k.shape[2]
    group = heads // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    raw = a["scale"] * q @ k.transpose(0, 1, 3, 2)
    if a.get("softcap"):
        raw = a["softcap"] * np.tanh(raw / a["softcap"])
    index = np.broadcast_to(arrays[6], (batch, heads))
    allowed = decode_mask(arrays, a)[index][:, :, :seq_q, :seq_kv].copy()
    if a["kv_kind"] == "mask":
        allowed &= (kv != 0)[:, None, None, :]
    elif a["kv_kind"] == "length":
        allowed &= (np.arange(seq_kv) < kv[:, None])[:, None, None, :]
    scores = raw
    if a["bias_kind"] == "dense":
        scores = raw + bias
        allowed &= ~np.isneginf(bias)
    elif a["bias_kind"] == "relative":
        entry = np.arange(seq_kv)[None] - np.arange(seq_q)[:, None] + a["rel_rq"] - 1
        scores = raw + bias[:, entry][None]
    masked = np.where(allowed, scores, -np.inf)
    top = np.maximum(masked.max(axis=-1, keepdims=True), -1e300)
    weight = np.where(allowed, np.exp(masked - top), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    o = (weight / np.where(total == 0, 1, total)) @ v
    empty = total == 0
    if a["masked_row"] == "mean":
        o = np.where(empty, v.mean(axis=2, keepdims=True), o)
    elif a["masked_row"] == "nan":
        o = np.where(empty, np.nan, o)
    elif a["masked_row"] == "scores":
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        o = np.where(empty, p / p.sum(axis=-1, keepdims=True) @ v, o)
    return o


class StofAttention(OpRun):
    """For onnx.reference.ReferenceEvaluator(new_ops=[...])."""

    op_domain = "stof"

    def _run(self, *inputs: np.ndarray, **_: Any) -> tuple[np.ndarray]:
        attributes = {x.name: getattr(self, x.name) for x in self.onnx_node.attribute}
        return (attention(list(inputs), attributes),)
