"""Our kernels behind the same call as the peers: encode, lower, launch through the C API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from stof_onnx.kernels import capi
from stof_onnx.kernels.lower_mask import MaskConfig, lower_mask
from stof_onnx.kernels.select import KERNELS, Device, KernelSite, lower_site
from stof_onnx.mask import EncodedMask, encode_bands, statistics

from .cases import Case
from .masks import BenchMask
from .record import ROOT

DTYPES = {"float16": capi.DType.F16, "bfloat16": capi.DType.BF16, "float32": capi.DType.F32}
NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
LIBRARY = ROOT / "build" / "cuda" / "libstof_capi.so"


def encode(mask: BenchMask, s: int) -> EncodedMask:
    """The mask in portable 64 x 64 tiles, streamed by row bands."""
    return encode_bands(mask.bands(s), s, s)


def density(mask: EncodedMask) -> float:
    """Allowed elements over all."""
    return float(statistics(mask).density)


def nonempty_tiles(mask: EncodedMask) -> int:
    """Full and part 64 x 64 tiles."""
    return int(mask.full_row_ptr[0, -1] + mask.part_row_ptr[0, -1])


def device(path: str) -> Device:
    """This GPU as lowering sees it; "sm80" and "sm90" leave only that kernel family."""
    properties = torch.cuda.get_device_properties(0)
    arch = 10 * properties.major + properties.minor
    kernels = KERNELS if path == "auto" else (f"block_{path}",)
    return Device(arch, properties.multi_processor_count, kernels)


@dataclass(frozen=True)
class Lowered:
    """What the kernel of a case reads, still on the host."""

    arrays: dict[str, np.ndarray]
    attributes: dict[str, Any]


def lowered(encoded: EncodedMask, case: Case, path: str) -> Lowered:
    """The mask in the form of the kernel for the case.

    Args:
        encoded: the portable mask.
        case: shape and dtype.
        path: "sm80", "sm90", or "auto" for what lowering chooses for this GPU; "row" is the row-wise kernel.
    """
    if path == "row":
        mask = lower_mask(encoded, MaskConfig(64, 64))
        return Lowered(mask.to_onnx_arrays(), {"kernel": "row_wise", "splits": 1, **mask.attributes()})
    site = KernelSite(case.batch, case.heads, case.dim, case.dim, NAMES[case.dtype], case.dim**-0.5)
    chosen = lower_site(encoded, site, device(path))
    return Lowered(chosen.arrays, dict(chosen.attributes))


class Ours:
    """One kernel configuration on one mask; call it with Q, K, V as [B, H, S, D] views.

    Raises:
        StofError: the library is missing, or it has no instance for the case.
    """

    def __init__(self, lowered: Lowered, case: Case) -> None:
        self.case = case
        self.library = capi.KernelLibrary(LIBRARY)
        arrays, attributes = lowered.arrays, lowered.attributes
        self.name, self.splits = str(attributes["kernel"]), int(attributes["splits"])
        self.kernel = capi.Kernel[self.name.upper()]
        self.config = f"{attributes['tile_m']}x{attributes['tile_n']}" + (
            f"/split{self.splits}" if self.splits > 1 else ""
        )
        self.longest = int(attributes["mask_max_row_tiles"])
        self._arrays = {n: torch.from_numpy(a.copy()).cuda() for n, a in arrays.items()}
        self.view = capi.MaskView(
            **{n: a.data_ptr() for n, a in self._arrays.items()},
            **{n: int(attributes[f"mask_{n}"]) for n in ("n_masks", "rows", "cols", "n_full", "n_part")},
            tile_m=int(attributes["tile_m"]),
            tile_n=int(attributes["tile_n"]),
            split_rows=int(attributes.get("split_rows", 0)),
            bitmap_order=int(attributes["mask_fragment_order"]),
            index_b=arrays["mask_index"].shape[0],
            index_h=arrays["mask_index"].shape[1],
        )
        self._workspace: torch.Tensor | None = None

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
