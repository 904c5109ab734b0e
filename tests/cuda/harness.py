"""One attention case on the GPU: fresh inputs, a float64 reference, the same computation in the tensors' own precision.

torch is the allocator and the reference; the kernels are called through the C API. Outputs start poisoned and lie
between guard zones, keys and values are followed by NaN rows, and every case runs twice and must repeat bit for bit.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from stof_onnx.errors import StofError
from stof_onnx.kernels import capi
from stof_onnx.kernels.lower_mask import MaskConfig, lower_mask
from stof_onnx.kernels.lower_sm90 import BAND, lower_grouped
from stof_onnx.mask import EncodedMask, encode

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
CAPI_DTYPES = {"f16": capi.DType.F16, "bf16": capi.DType.BF16, "f32": capi.DType.F32}
POISON = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
}
# One rounding of the output, which any kernel is owed on top of twice the framework's error.
ROUNDING = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-20}
GUARD = 4096  # elements
NAN_ROWS = 8  # after the last key
SINK_NATS = 10.0  # how far the score of a key that draws every query lies above the others'


@dataclass(frozen=True)
class Case:
    """What to run. `encoded` is the (S_q, S_kv) the mask is encoded at, None: the sequence itself."""

    mask: str = "causal"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    seq_q: int = 130
    seq_kv: int = 130
    dim: int = 64
    v_dim: int = 64
    dtype: str = "f16"
    layout: str = "BHSD"
    tile: tuple[int, int] = (64, 64)
    order: capi.BitmapOrder = capi.BitmapOrder.TILES
    encoded: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float = 0.0
    # none, dense, dense_bh (no broadcast), dense_inf (some -inf), dense_lowest (some finfo.min), relative, relative_1
    bias: str = "none"
    kv: str = "none"  # none, mask, length
    masked_row: capi.MaskedRow = capi.MaskedRow.ZERO
    kernel: capi.Kernel = capi.Kernel.BLOCK_SM80
    f32_math: capi.F32Math = capi.F32Math.FFMA
    splits: int = 1
    split_rows: int = 0
    # The key that draws every query: none, first, last. Its value is zero, so that the output is what the others leave.
    sink: str = "none"

    def __str__(self) -> str:
        defaults = Case()
        parts = [
            self.mask,
            f"B{self.batch}H{self.heads}/{self.kv_heads}S{self.seq_q}x{self.seq_kv}D{self.dim}/{self.v_dim}",
        ]
        for field in dataclasses.fields(self)[7:]:
            value = getattr(self, field.name)
            if value != getattr(defaults, field.name) or field.name in ("dtype", "tile"):
                value = value.name if isinstance(value, (capi.enum.Enum,)) else value
                parts.append(f"{field.name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}")
        return "-".join(parts)


def allowed_matrix(case: Case, rng: np.random.Generator) -> np.ndarray:
    """The static mask, bool [1 or B, 1 or H, S_q, S_kv] at the encoded size."""
    s_q, s_kv = case.encoded or (case.seq_q, case.seq_kv)
    q, k = np.arange(s_q)[:, None], np.arange(s_kv)[None, :]
    width = max(8, int(max(s_q, s_kv) ** 0.5))
    window = np.abs(q - k) <= width
    name = case.mask
    if name == "all":
        one = np.ones((s_q, s_kv), bool)
    elif name == "none":
        one = np.zeros((s_q, s_kv), bool)
    elif name == "causal":
        one = q >= k
    elif name == "window":
        one = window
    elif name == "causal_window":
        one = (q >= k) & (q - k <= width)
    elif name == "longformer":
        one = window | (q < width) | (k < width)
    elif name == "packed":
        cuts = np.sort(rng.integers(0, max(s_q, s_kv) + 1, 5))
        one = np.searchsorted(cuts, q, side="right") == np.searchsorted(cuts, k, side="right")
    elif name == "bigbird":
        block = 64
        rows, cols = -(-s_q // block), -(-s_kv // block)
        i, j = np.arange(rows)[:, None], np.arange(cols)[None, :]
        blocks = (
            (np.abs(i - j) <= 1)
            | (i == 0)
            | (j == 0)
            | (i == rows - 1)
            | (j == cols - 1)
            | (rng.random((rows, cols)) < 0.2)
        )
        one = blocks.repeat(block, 0).repeat(block, 1)[:s_q, :s_kv]
    elif name == "random":
        one = rng.random((s_q, s_kv)) < 0.1
    elif name == "sparse":
        one = (rng.random((s_q, s_kv)) < 2.0 / s_kv) | (q == k)
    elif name == "empty_rows":
        one = (rng.random((s_q, s_kv)) < 0.3) & (rng.random((s_q, 1)) < 0.6)
    elif name == "per_head":
        density = rng.random((1, case.heads, 1, 1))
        return rng.random((1, case.heads, s_q, s_kv)) < density
    elif name == "per_batch_head":
        density = rng.random((case.batch, case.heads, 1, 1))
        return (rng.random((case.batch, case.heads, s_q, s_kv)) < density) & (
            rng.random((case.batch, case.heads, s_q, 1)) < 0.9
        )
    else:
        raise ValueError(name)
    return one[None, None]


@dataclass
class DeviceMask:
    """A lowered mask in device memory, and the view the kernels take. Keeps the arrays alive."""

    view: capi.MaskView
    arrays: dict[str, torch.Tensor]
    max_row_tiles: int


def device_mask(
    mask: EncodedMask, order: capi.BitmapOrder = capi.BitmapOrder.TILES, device: str = "cuda"
) -> DeviceMask:
    fragments = order == capi.BitmapOrder.FRAGMENTS
    lowered = lower_mask(mask, MaskConfig(mask.tile_m, mask.tile_n, fragment_order=fragments))
    arrays = {name: torch.from_numpy(np.array(a)).to(device) for name, a in lowered.to_onnx_arrays().items()}
    m = lowered.mask
    index_b, index_h = m.mask_index.shape
    view = capi.MaskView(
        **{name: a.data_ptr() for name, a in arrays.items()},
        index_b=index_b, index_h=index_h, n_masks=m.n_masks, rows=m.rows, cols=m.cols, n_full=m.n_full, n_part=m.n_part,
        tile_m=m.tile_m, tile_n=m.tile_n, split_rows=0, bitmap_order=int(order),
    )  # fmt: skip
    return DeviceMask(view, arrays, lowered.stats.max_row_tiles)


def grouped_device_mask(mask: EncodedMask, device: str = "cuda") -> DeviceMask:
    """Lowered for the Hopper kernel; the tile says how many bands a group has and how wide its key tiles are."""
    lowered = lower_grouped(mask, mask.tile_m // BAND, keys=mask.tile_n)
    arrays = {name: torch.from_numpy(np.array(a)).to(device) for name, a in lowered.arrays.items()}
    index_b, index_h = lowered.arrays["mask_index"].shape
    view = capi.MaskView(
        **{name: a.data_ptr() for name, a in arrays.items()},
        index_b=index_b, index_h=index_h, n_masks=lowered.n_masks, rows=lowered.groups, cols=lowered.cols,
        n_full=lowered.n_full, n_part=lowered.n_part, tile_m=BAND * lowered.bands, tile_n=lowered.keys,
        split_rows=lowered.split_groups, bitmap_order=int(capi.BitmapOrder.FRAGMENTS),
    )  # fmt: skip
    return DeviceMask(view, arrays, lowered.max_group_tiles)


def tensor_view(t: torch.Tensor) -> capi.TensorView:
    """Of a [B, H, S, D] view whose last axis is contiguous."""
    assert t.stride(3) == 1
    return capi.TensorView(t.data_ptr(), t.stride(0), t.stride(1), t.stride(2))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    softcap: float,
    bias: torch.Tensor | None,
    masked_row: capi.MaskedRow,
    dtype: torch.dtype,
    tf32: bool = False,
) -> torch.Tensor:
    """Dense attention in `dtype`, head by head: [B, H, S_q, Dv]. `allowed` is [B, 1 or H, S_q, S_kv].

    tf32 rounds the operands of both products as tensor cores do (torch's own switch leaves small products in fp32).
    """
    batch, heads = q.shape[:2]
    operand = rounded_to_tf32 if tf32 else lambda x: x
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
    for b in range(batch):
        for h in range(heads):
            kv_head = h // (heads // k.shape[1])
            s = (operand(q[b, h].to(dtype)) @ operand(k[b, kv_head].to(dtype)).T) * scale
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if bias is not None:
                s = s + bias[b % bias.shape[0], h % bias.shape[1]].to(dtype)
            ok = allowed[b, h % allowed.shape[1]] & (s != -torch.inf)  # a bias of -inf hides like the mask
            p = torch.softmax(s.masked_fill(~ok, -torch.inf), -1)
            empty = ~ok.any(-1, keepdim=True)
            instead = {
                capi.MaskedRow.ZERO: lambda s: torch.zeros_like(s),
                capi.MaskedRow.NAN: lambda s: torch.full_like(s, torch.nan),
                capi.MaskedRow.MEAN: lambda s: torch.full_like(s, 1.0 / s.shape[-1]),
                capi.MaskedRow.SCORES: lambda s: torch.softmax(s, -1),
            }[masked_row]
            out[b, h] = operand(torch.where(empty, instead(s), p)) @ operand(v[b, kv_head].to(dtype))
    return out


def rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 values with the mantissa rounded to tf32's 10 bits, ties away from zero (as cvt.rna.tf32 does)."""
    rounded = ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


class Inputs:
    """Fresh tensors of a case on a device, as [B, H, S, D] views of the case's layout."""

    def __init__(self, case: Case, seed: int, device: str = "cuda") -> None:
        self.case, self.device = case, device
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.dtype = DTYPES[case.dtype]
        self.scale = case.dim**-0.5 if case.scale is None else case.scale
        if case.layout == "packed":
            assert case.seq_q == case.seq_kv and case.dim == case.v_dim
            total = (case.heads + 2 * case.kv_heads) * case.dim
            packed = self._randn(case.batch, case.seq_q, total // case.dim, case.dim).transpose(1, 2)
            self.q, self.k, self.v = packed.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
        else:
            self.q = self._tensor(case.heads, case.seq_q, case.dim, 0)
            self.k = self._tensor(case.kv_heads, case.seq_kv, case.dim, NAN_ROWS)
            self.v = self._tensor(case.kv_heads, case.seq_kv, case.v_dim, NAN_ROWS)
        if case.sink != "none":
            self._draw_to(0 if case.sink == "first" else case.seq_kv - 1)
        static = allowed_matrix(case, self.rng)
        encoded = encode(static, *case.tile)
        if case.kernel == capi.Kernel.BLOCK_SM90:
            self.mask = grouped_device_mask(encoded, device)
        else:
            self.mask = device_mask(encoded, case.order, device)
        allowed = torch.from_numpy(np.ascontiguousarray(static[:, :, : case.seq_q, : case.seq_kv])).to(device)
        self.allowed = allowed.expand(case.batch, -1, -1, -1)
        self.kv = self._key_padding()
        self.bias, self.bias_storage = self._bias()

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def _tensor(self, heads: int, seq: int, dim: int, nan_rows: int) -> torch.Tensor:
        shape = (self.case.batch, heads, seq, dim)
        if self.case.layout == "BSHD":
            padded = torch.full((shape[0], seq + nan_rows, heads, dim), torch.nan, dtype=self.dtype, device=self.device)
            view = padded[:, :seq].transpose(1, 2)
        else:
            padded = torch.full((shape[0], heads, seq + nan_rows, dim), torch.nan, dtype=self.dtype, device=self.device)
            view = padded[:, :, :seq]
        view.copy_(self._randn(*shape))
        return view

    def _draw_to(self, key: int) -> None:
        self.q[..., 0] = 6.0
        self.k[..., 0] = 0.0
        self.k[:, :, key] = 0.0
        self.k[:, :, key, 0] = SINK_NATS / (6.0 * self.scale)
        self.v[:, :, key] = 0.0

    def _key_padding(self) -> torch.Tensor | None:
        case = self.case
        if case.kv == "none":
            return None
        if case.kv == "length":
            lengths = self.rng.integers(0, case.seq_kv + 1, case.batch)
            lengths[0] = max(1, lengths[0])
            kv = torch.from_numpy(lengths.astype(np.int32)).to(self.device)
            attend = torch.arange(case.seq_kv, device=self.device)[None] < kv[:, None]
        else:
            kv = torch.from_numpy((self.rng.random((case.batch, case.seq_kv)) < 0.7).astype(np.int32)).to(self.device)
            attend = kv != 0
        self.allowed = self.allowed & attend[:, None, None]
        return kv

    def _bias(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The bias as the reference adds it, [1 or B, 1 or H, S_q, S_kv], and as the kernel reads it."""
        case = self.case
        if case.bias == "none":
            return None, None
        if case.bias.startswith("relative"):
            rel_rq = case.seq_q + 3
            table = self._randn(1 if case.bias == "relative_1" else case.heads, rel_rq + case.seq_kv + 4)
            at = (
                torch.arange(case.seq_kv, device=self.device)[None]
                - torch.arange(case.seq_q, device=self.device)[:, None]
            )
            return table[:, at + rel_rq - 1][None], table
        shape = (case.batch, case.heads) if case.bias == "dense_bh" else (1, case.heads)
        dense = self._randn(*shape, case.seq_q, case.seq_kv)
        if case.bias in ("dense_inf", "dense_lowest"):
            hidden = torch.rand(dense.shape, generator=self.generator, device=self.device) < 0.3
            rows = torch.rand(*dense.shape[:3], 1, generator=self.generator, device=self.device) < 0.2
            lowest = -torch.inf if case.bias == "dense_inf" else torch.finfo(self.dtype).min
            dense.masked_fill_(hidden | rows, lowest)
        return dense, dense

    def params(self, out: torch.Tensor) -> capi.AttentionParams:
        """Everything but the workspace."""
        case = self.case
        p = capi.AttentionParams(
            q=tensor_view(self.q), k=tensor_view(self.k), v=tensor_view(self.v), o=tensor_view(out),
            batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, seq_q=case.seq_q, seq_kv=case.seq_kv,
            dim=case.dim, v_dim=case.v_dim, dtype=CAPI_DTYPES[case.dtype], f32_math=case.f32_math, scale=self.scale,
            softcap=case.softcap, mask=self.mask.view, masked_row=case.masked_row, kernel=case.kernel,
            splits=case.splits, max_row_tiles=self.mask.max_row_tiles,
        )  # fmt: skip
        if case.kernel != capi.Kernel.BLOCK_SM90:
            p.mask.split_rows = case.split_rows
        if self.kv is not None:
            p.kv, p.kv_stride = self.kv.data_ptr(), case.seq_kv
            p.kv_kind = capi.KvKind.LENGTH if case.kv == "length" else capi.KvKind.MASK
        if self.bias_storage is not None:
            p.bias = self.bias_storage.data_ptr()
            if case.bias.startswith("relative"):
                heads, length = self.bias_storage.shape
                p.bias_kind, p.rel_rq, p.rel_len = capi.BiasKind.RELATIVE, case.seq_q + 3, length
                p.bias_stride_h = length if heads > 1 else 0
            else:
                b, h = self.bias_storage.shape[:2]
                strides = self.bias_storage.stride()
                p.bias_kind = capi.BiasKind.DENSE
                p.bias_stride_b, p.bias_stride_h = strides[0] if b > 1 else 0, strides[1] if h > 1 else 0
                p.bias_stride_q = strides[2]
        return p

    def output(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A poisoned output in the case's layout, as [B, H, S_q, Dv], and the whole buffer with its guard zones."""
        case = self.case
        size = case.batch * case.heads * case.seq_q * case.v_dim
        word, pattern = POISON[self.dtype]
        buffer = torch.full((size + 2 * GUARD,), pattern, dtype=word, device=self.device).view(self.dtype)
        inside = buffer[GUARD : GUARD + size]
        if case.layout == "BHSD":
            return inside.view(case.batch, case.heads, case.seq_q, case.v_dim), buffer
        return inside.view(case.batch, case.seq_q, case.heads, case.v_dim).transpose(1, 2), buffer


def run(library: capi.KernelLibrary, inputs: Inputs, fresh_workspace: bool = False) -> torch.Tensor:
    """Runs the case into a poisoned output; checks guard zones and that every element was written.

    fresh_workspace leaves the workspace as allocated, for compute-sanitizer's initcheck.
    """
    out, buffer = inputs.output()
    p = inputs.params(out)
    reason = library.unsupported(p)
    assert reason is None, f"unsupported: {reason}"
    bytes_needed = library.workspace_bytes(p)
    word, pattern = POISON[inputs.dtype]
    workspace = torch.empty(bytes_needed + GUARD, dtype=torch.uint8, device=inputs.device)
    (workspace[bytes_needed:] if fresh_workspace else workspace).fill_(0xA5)
    p.workspace, p.workspace_bytes = workspace.data_ptr(), bytes_needed
    library.forward(p, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    words = buffer.view(word)
    assert bool((words[:GUARD] == pattern).all()) and bool((words[-GUARD:] == pattern).all()), (
        "wrote outside the output"
    )
    assert bool((workspace[bytes_needed:] == 0xA5).all()), "wrote outside the workspace"
    assert not bool((words[GUARD:-GUARD] == pattern).any()), "left elements unwritten"
    return out


def case_seed(case: Case, base_seed: int) -> int:
    return (zlib.crc32(str(case).encode()) ^ base_seed) & 0x7FFFFFFF


def check(library: capi.KernelLibrary, case: Case, base_seed: int) -> tuple[float, float]:
    """Runs one case and compares. Returns (our error, the framework's error), both against float64.

    Raises:
        AssertionError: with the case and the seed in the message.
    """
    seed = case_seed(case, base_seed)
    where = f"{case} (base seed {base_seed})"
    inputs = Inputs(case, seed)
    try:
        out = run(library, inputs)
        again = run(library, inputs)
    except (AssertionError, StofError) as error:
        raise AssertionError(f"{where}: {error}") from error
    word = POISON[inputs.dtype][0]
    assert torch.equal(out.contiguous().view(word), again.contiguous().view(word)), f"{where}: two runs differ"

    tf32 = case.dtype == "f32" and case.f32_math == capi.F32Math.TF32
    arguments = (inputs.q, inputs.k, inputs.v, inputs.allowed, inputs.scale, case.softcap, inputs.bias, case.masked_row)
    reference = attention(*arguments, torch.float64)
    framework = attention(*arguments, inputs.dtype, tf32).double()
    assert torch.equal(torch.isnan(out), torch.isnan(reference)), (
        f"{where}: NaN where there should be none, or the reverse"
    )
    size = reference.nan_to_num().abs().max().item()
    ours = (out.double() - reference).nan_to_num().abs().max().item()
    theirs = (framework - reference).nan_to_num().abs().max().item()
    bound = 2 * theirs + ROUNDING["f16" if tf32 else case.dtype] * size
    assert ours <= bound, (
        f"{where}: error {ours:.3g} > {bound:.3g} (the framework's own: {theirs:.3g}, values up to {size:.3g})"
    )
    return ours, theirs
