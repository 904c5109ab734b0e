"""What a user would run instead, each on the same mask. A peer that cannot run a mask returns no function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from stof_onnx.mask import EncodedMask, retile
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .gate import gate
from .masks import BenchMask

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TABLE_LIMIT = 16384  # above this FlexAttention looks blocks up, not elements

torch._dynamo.config.recompile_limit = 1000
torch._dynamo.config.accumulated_recompile_limit = 10000


def _inductor(graph: Any, inputs: Any) -> Any:
    """torch.compile's own backend; other processes may use the GPU while it compiles."""
    from torch._inductor.compile_fx import compile_fx

    with gate.left():
        return compile_fx(graph, inputs)


_flex = torch.compile(flex_attention, dynamic=False, backend=_inductor)


def block_lists(encoded: EncodedMask, tile_m: int, tile_n: int) -> dict[str, torch.Tensor]:
    """Counts [1, 1, rows] and columns [1, 1, rows, cols] of the part and of the full tiles, int32, on the GPU.

    The same lists as `create_block_mask` makes from the mask's function, without evaluating it S x S times.
    """
    out: dict[str, torch.Tensor] = {}
    with gate.left():
        tiled = retile(encoded, tile_m, tile_n)
    for kind in ("part", "full"):
        pointers, listed = getattr(tiled, f"{kind}_row_ptr")[0], getattr(tiled, f"{kind}_col_idx")
        counts = np.diff(pointers)
        columns = np.zeros((tiled.rows, tiled.cols), np.int32)
        columns[np.arange(tiled.cols)[None] < counts[:, None]] = listed[: pointers[-1]]
        out[f"{kind}_counts"] = torch.from_numpy(counts.astype(np.int32))[None, None].cuda()
        out[f"{kind}_columns"] = torch.from_numpy(columns)[None, None].cuda()
    return out


def flex(mask: BenchMask, encoded: EncodedMask, tile: int) -> Run:
    """FlexAttention compiled for the mask; Q, K, V are [B, H, S, D]."""
    s, allowed = encoded.s_q, mask.on("cuda")
    if mask.table is not None and mask.block > 1 and s <= TABLE_LIMIT:
        # One look-up an element: what its users write, and three times as fast as block arithmetic.
        table = dense(mask, s)

        def allowed(q: Any, k: Any) -> Any:
            return table[q, k]

    lists = block_lists(encoded, tile, tile)
    block = BlockMask.from_kv_blocks(
        lists["part_counts"], lists["part_columns"], lists["full_counts"], lists["full_columns"],
        BLOCK_SIZE=tile, mask_mod=lambda b, h, q, k: allowed(q, k), seq_lengths=(s, s),
    )  # fmt: skip
    # Its own choice of tile is 128 rows, which blocks of 64 do not divide.
    options = None if tile == 128 else {"BLOCK_M": tile, "BLOCK_N": tile}
    return lambda q, k, v: _flex(q, k, v, block_mask=block, enable_gqa=q.shape[1] != k.shape[1], kernel_options=options)


def _sdpa(backend: SDPBackend, **kwargs: Any) -> Run:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **kwargs)

    return run


def dense(mask: BenchMask, s: int) -> torch.Tensor:
    """The dense [S, S] mask on the GPU, by row bands."""
    out = torch.empty(s, s, dtype=torch.bool, device="cuda")
    allowed, k = mask.on("cuda"), torch.arange(s, device="cuda")[None]
    for q0 in range(0, s, 4096):
        out[q0 : q0 + 4096] = allowed(torch.arange(q0, min(s, q0 + 4096), device="cuda")[:, None], k)
    return out


def fa4(mask: BenchMask, encoded: EncodedMask, tile: tuple[int, int] | None) -> Run | None:
    """FlashAttention-4 (CuTe): native causal or window where `tile` is None, else its block-sparse lists.

    Takes [B, H, S, D] like the others; its own layout is [B, S, H, D], so the caller hands it transposed views of
    tensors that already lie that way.
    """
    try:
        from . import fa4_peer
    except ImportError:
        return None
    return fa4_peer.make(mask, None if tile is None else block_lists(encoded, *tile), tile)


def make(name: str, mask: BenchMask, encoded: EncodedMask) -> Run | None:
    """The peer called `name` on `mask`, or None where it does not apply."""
    if name in ("flex128", "flex64"):
        return flex(mask, encoded, int(name[4:]))
    if name == "cudnn_mask":
        return _sdpa(SDPBackend.CUDNN_ATTENTION, attn_mask=dense(mask, encoded.s_q))
    if name == "cudnn_causal":
        return _sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=True) if mask.causal else None
    if name == "fa2_causal":
        return _sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True) if mask.causal else None
    if name == "fa4_native":
        return fa4(mask, encoded, None) if mask.causal or mask.window else None
    if name in ("fa4_128", "fa4_64"):
        return None if mask.causal else fa4(mask, encoded, (128, int(name[4:])))
    raise ValueError(f"unknown peer {name}")


NAMES = ("flex128", "flex64", "cudnn_mask", "cudnn_causal", "fa2_causal", "fa4_native", "fa4_128", "fa4_64")
# What a line of the results calls them: the better tile of each.
GROUPS = {
    "flex": ("flex128", "flex64"),
    "cudnn_mask": ("cudnn_mask",),
    "cudnn_causal": ("cudnn_causal",),
    "fa2_causal": ("fa2_causal",),
    "fa4": ("fa4_native", "fa4_128", "fa4_64"),
}
