"""FlashAttention-4 (flash-attn-4, CuTe DSL, sm_90) as a peer; importing this needs its wheels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import interface, utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

from .gate import gate
from .masks import BenchMask


def _mask_mod(mask: BenchMask) -> tuple[Any, list[torch.Tensor] | None]:
    """The mask as a CuTe function: arithmetic for windows and Longformer, a table look-up for the rest."""
    name = mask.name
    if name.startswith("window"):
        w = int(name.removeprefix("window"))

        @cute.jit
        def window(batch, head, q, k, seqlen_info, aux):  # type: ignore[no-untyped-def]
            ws = utils.scalar_to_ssa(w, cutlass.Int32)
            return (k >= q - ws) & (k <= q + ws)

        return window, None
    if name.startswith("causal_window"):
        w = int(name.removeprefix("causal_window"))

        @cute.jit
        def causal_window(batch, head, q, k, seqlen_info, aux):  # type: ignore[no-untyped-def]
            ws = utils.scalar_to_ssa(w, cutlass.Int32)
            return (k >= q - ws) & (k <= q)

        return causal_window, None
    if name.startswith("longformer"):
        w = int(name.removeprefix("longformer"))

        @cute.jit
        def longformer(batch, head, q, k, seqlen_info, aux):  # type: ignore[no-untyped-def]
            ws = utils.scalar_to_ssa(w, cutlass.Int32)
            return ((k >= q - ws) & (k <= q + ws)) | (k < ws) | (q < ws)

        return longformer, None
    if name.startswith("block_diagonal"):
        doc = int(name.removeprefix("block_diagonal"))

        @cute.jit
        def block_diagonal(batch, head, q, k, seqlen_info, aux):  # type: ignore[no-untyped-def]
            d = utils.scalar_to_ssa(doc, cutlass.Int32)
            return q // d == k // d

        return block_diagonal, None
    if mask.table is None:
        raise ValueError(f"no FlashAttention-4 version of mask {name}")
    block, table = mask.block, torch.from_numpy(mask.table).to("cuda", torch.int32)

    @cute.jit
    def look_up(batch, head, q, k, seqlen_info, aux):  # type: ignore[no-untyped-def]
        one = utils.scalar_to_ssa(1, cutlass.Int32)
        return utils.scalar_to_ssa(aux[0][q[0] // block, k[0] // block], cutlass.Int32) == one

    return look_up, [table]


def _compile(*args: Any, **kwargs: Any) -> Any:
    """cute.compile; other processes may use the GPU meanwhile."""
    with gate.left():
        return _cute_compile(*args, **kwargs)


_cute_compile = interface.cute.compile
interface.cute.compile = _compile


def make(
    mask: BenchMask, lists: dict[str, torch.Tensor] | None, tile: tuple[int, int] | None
) -> Callable[..., torch.Tensor]:
    """On `mask`: native causal/window without `lists`, else block-sparse with `peers.block_lists` of these tiles."""
    kwargs: dict[str, Any] = {}
    if lists is None:
        kwargs = {"causal": True} if mask.causal else {"window_size": mask.window}
    else:
        mod, aux = _mask_mod(mask)
        kwargs = {
            "mask_mod": mod,
            "aux_tensors": aux,
            "block_sparse_tensors": BlockSparseTensorsTorch(
                mask_block_cnt=lists["part_counts"],
                mask_block_idx=lists["part_columns"],
                full_block_cnt=lists["full_counts"],
                full_block_idx=lists["full_columns"],
                block_size=tile,
            ),
        }

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = interface.flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2)

    return run
