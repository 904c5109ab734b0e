"""Our kernels behind the same call as the peers: encode, lower, launch through the C API."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stof_onnx.kernels import capi
from stof_onnx.kernels.lower_mask import MaskConfig, lower_mask
from stof_onnx.kernels.lower_sm90 import lower_grouped
from stof_onnx.mask import EncodedMask, encode_bands, statistics

from .cases import Case
from .masks import BenchMask
from .record import ROOT

DTYPES = {"float16": capi.DType.F16, "bfloat16": capi.DType.BF16, "float32": capi.DType.F32}
LIBRARY = ROOT / "build" / "cuda" / "libstof_capi.so"


def encode(mask: BenchMask, s: int) -> EncodedMask:
    """The mask in portable 64 x 64 tiles, streamed by row bands."""
    return encode_bands(lambda q0, q1: mask.rows(q0, q1, s), s, s)


def density(mask: EncodedMask) -> float:
    """Allowed elements over all."""
    return float(statistics(mask).density)


def nonempty_tiles(mask: EncodedMask) -> int:
    """Full and part 64 x 64 tiles."""
    return int(mask.full_row_ptr[0, -1] + mask.part_row_ptr[0, -1])


class Ours:
    """One kernel configuration on one mask; call it with Q, K, V as [B, H, S, D] views.

    Args:
        encoded: the portable mask.
        case: shape and dtype.
        path: "sm80", "sm90", "row", or "auto" for what a user of this GPU gets.

    Raises:
        StofError: the library is missing, or it has no instance for the case.
    """

    def __init__(self, encoded: EncodedMask, case: Case, path: str) -> None:
        self.case = case
        self.library = capi.KernelLibrary(LIBRARY)
        if path == "auto":
            major, _ = torch.cuda.get_device_capability()
            path = "sm90" if major == 9 and case.dim <= 128 and case.dtype != "float32" else "sm80"
        view = capi.MaskView()
        if path == "sm90":
            arrays, longest = self._grouped(encoded, view)
        else:
            arrays, longest = self._tiled(encoded, view, path == "row")
        self._arrays = {n: torch.from_numpy(np.ascontiguousarray(a)).cuda() for n, a in arrays.items()}
        for name, array in self._arrays.items():
            setattr(view, name, array.data_ptr())
        view.index_b, view.index_h = arrays["mask_index"].shape
        self.view, self.longest = view, longest
        self._workspace: torch.Tensor | None = None

    def _grouped(self, encoded: EncodedMask, view: Any) -> tuple[dict[str, np.ndarray], int]:
        bands = 2 if self.case.dim > 64 else 4 if self.case.seq <= 1024 else 3
        g = lower_grouped(encoded, bands)
        view.n_masks, view.rows, view.cols = g.n_masks, g.groups, g.cols
        view.n_full, view.n_part, view.tile_m, view.tile_n = g.n_full, g.n_part, 64 * bands, 64
        view.split_rows, view.bitmap_order = g.split_groups, capi.BitmapOrder.FRAGMENTS
        self.kernel, self.splits, self.name = capi.Kernel.BLOCK_SM90, 1, "block_sm90"
        self.config = f"{64 * bands}x64"
        return g.arrays, g.max_group_tiles

    def _tiled(self, encoded: EncodedMask, view: Any, row_wise: bool) -> tuple[dict[str, np.ndarray], int]:
        lengths = np.diff(encoded.full_row_ptr, axis=1) + np.diff(encoded.part_row_ptr, axis=1)
        median = max(1, int(np.median(lengths)))
        heavy = int((lengths > 4 * median).sum())
        # Long uniform lists (causal, dense) reuse K and V over 128 rows; short ones want exact 64-row lists.
        dense = heavy == 0 and lengths.mean() > 24
        tile_m = 128 if dense and not row_wise else 64
        lowered = lower_mask(encoded, MaskConfig(tile_m, 64, fragment_order=not row_wise))
        m = lowered.mask
        view.n_masks, view.rows, view.cols = m.full_row_ptr.shape[0], m.full_row_ptr.shape[1] - 1, m.cols
        view.n_full, view.n_part, view.tile_m, view.tile_n = len(m.full_col_idx), len(m.part_col_idx), tile_m, 64
        view.bitmap_order = capi.BitmapOrder.TILES if row_wise else capi.BitmapOrder.FRAGMENTS
        self.splits = 1 if row_wise or not heavy else min(16, max(2, int(lengths.max()) // (8 * median)))
        view.split_rows = heavy if self.splits > 1 else 0
        self.kernel = capi.Kernel.ROW_WISE if row_wise else capi.Kernel.BLOCK_SM80
        self.name = "row_wise" if row_wise else "block_sm80"
        self.config = f"{tile_m}x64" + (f"/split{self.splits}" if self.splits > 1 else "")
        tiles = np.diff(m.full_row_ptr, axis=1) + np.diff(m.part_row_ptr, axis=1)
        return lowered.to_onnx_arrays(), int(tiles.max())

    @property
    def extra_bytes(self) -> int:
        """Device memory beside Q, K, V and O: the mask's arrays and the workspace of the last call."""
        workspace = 0 if self._workspace is None else self._workspace.numel()
        return workspace + sum(a.numel() * a.element_size() for a in self._arrays.values())

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """O as [B, H, S, D] in Q's layout, on the current stream."""
        out = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
        views = [capi.TensorView(t.data_ptr(), *t.stride()[:3]) for t in (q, k, v, out)]
        c = self.case
        p = capi.AttentionParams(
            q=views[0], k=views[1], v=views[2], o=views[3], batch=c.batch, heads=c.heads,
            kv_heads=c.kv_heads or c.heads, seq_q=c.seq, seq_kv=c.seq, dim=c.dim, v_dim=c.dim, dtype=DTYPES[c.dtype],
            scale=c.dim**-0.5, mask=self.view, kernel=self.kernel, splits=self.splits, max_row_tiles=self.longest,
        )  # fmt: skip
        needed = self.library.workspace_bytes(p)
        if needed:
            if self._workspace is None or self._workspace.numel() < needed:
                self._workspace = torch.empty(needed, dtype=torch.uint8, device="cuda")
            p.workspace, p.workspace_bytes = self._workspace.data_ptr(), needed
        self.library.forward(p, torch.cuda.current_stream().cuda_stream)
        return out
