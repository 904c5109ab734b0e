"""What a user would run instead, each on the same mask. A peer that cannot run a mask returns no function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .masks import BenchMask

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
DENSE_LIMIT = 16384  # above this a dense S x S mask and its peers are left out of timing

torch._dynamo.config.recompile_limit = 1000
torch._dynamo.config.accumulated_recompile_limit = 10000
_flex = torch.compile(flex_attention, dynamic=False)


def flex(mask: BenchMask, s: int, tile: int) -> Run:
    """FlexAttention compiled for the mask; Q, K, V are [B, H, S, D]."""
    allowed = mask.on("cuda")
    if mask.table is not None and mask.block > 1 and s <= DENSE_LIMIT:
        # One look-up an element: what its users write, and three times as fast as block arithmetic.
        table = dense(mask, s)

        def allowed(q: Any, k: Any) -> Any:
            return table[q, k]

    block = create_block_mask(
        lambda b, h, q, k: allowed(q, k), None, None, s, s, device="cuda", BLOCK_SIZE=tile, _compile=s > 8192
    )
    return lambda q, k, v: _flex(q, k, v, block_mask=block, enable_gqa=q.shape[1] != k.shape[1])


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


def fa4(mask: BenchMask, s: int, tile: tuple[int, int] | None) -> Run | None:
    """FlashAttention-4 (CuTe): native causal or window where `tile` is None, else its block-sparse lists.

    Takes [B, H, S, D] like the others; its own layout is [B, S, H, D], so the caller hands it transposed views of
    tensors that already lie that way.
    """
    try:
        from . import fa4_peer
    except ImportError:
        return None
    return fa4_peer.make(mask, s, tile)


def make(name: str, mask: BenchMask, s: int) -> Run | None:
    """The peer called `name` on `mask`, or None where it does not apply."""
    if name in ("flex128", "flex64"):
        return flex(mask, s, int(name[4:]))
    if name == "cudnn_mask":
        return _sdpa(SDPBackend.CUDNN_ATTENTION, attn_mask=dense(mask, s)) if s <= DENSE_LIMIT else None
    if name == "cudnn_causal":
        return _sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=True) if mask.causal else None
    if name == "fa2_causal":
        return _sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True) if mask.causal else None
    if name == "fa4_native":
        return fa4(mask, s, None) if mask.causal or mask.window else None
    if name in ("fa4_128", "fa4_64"):
        return None if mask.causal else fa4(mask, s, (128, int(name[4:])))
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
