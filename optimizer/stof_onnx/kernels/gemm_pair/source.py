"""A pair of products + configuration → Triton source.

A thread block owns some rows. It sums x w1 over all of the depth, finishes the hidden rows, which stay on the chip, and
multiplies them by w2, some columns at a time. The kernel's parameters are the inputs, the output, and `rows` (int32).
"""

from __future__ import annotations

from math import ceil

from stof_onnx.kernels.gemm_pair.configs import PairConfig, check_config, padded
from stof_onnx.kernels.gemm_pair.pair import GemmPair

KERNEL = "stof_gemm_pair"
_TYPES = {"fp16": "tl.float16", "bf16": "tl.bfloat16"}
_ACTIVATIONS = {
    "none": "{0}",
    "relu": "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "gelu_erf": "{0} * 0.5 * (1.0 + tl.erf({0} * 0.7071067811865476))",
    # x/2 (1 + tanh u) = x / (1 + exp(-2u)), which does not cancel.
    "gelu_tanh": "{0} / (1.0 + tl.exp({0} * (-1.5957691216057308 - 0.07135481627159886 * {0} * {0})))",
    "silu": "{0} / (1.0 + tl.exp(-{0}))",
}
_SOURCE = """import triton
import triton.language as tl


@triton.jit
def {kernel}({parameters}):
    first = tl.program_id(0){share} * {rows}
{part}    r = tl.arange(0, {rows})[:, None]
    here = first + r < rows
    h = tl.arange(0, {padded})
    k = tl.arange(0, {step})
    x += first.to(tl.int64) * {depth}
    out += first.to(tl.int64) * {width}
{residual_base}    total = tl.zeros(({rows}, {padded}), tl.float32)
    for start in range(0, {depth}, {step}):
        a = tl.load(x + r * {depth} + (start + k)[None, :], mask={mask_a}, other=0.0)
        b = tl.load(w1 + (start + k)[:, None] * {hidden} + h[None, :]{mask_b})
        total = tl.dot(a, b, total)
{inner}    rows_between = total.to({type})
    for tile in range(0, {tiles}):
        c = ({own}tile) * {columns} + tl.arange(0, {columns})
        w = tl.load(w2 + h[:, None] * {width} + c[None, :]{mask_w})
{residual}        y = tl.dot(rows_between, w)
{outer}        tl.store(out + r * {width} + c[None, :], y.to({type}), mask={mask_out})
"""


def source(pair: GemmPair, config: PairConfig) -> str:
    """The source of a module with the kernel `stof_gemm_pair`.

    Raises:
        StofError: the configuration does not fit the pair.
    """
    check_config(pair, config)
    rows, columns, step, hidden = config.rows, config.columns, config.step, padded(pair.hidden)
    inside_k = f"(start + k < {pair.depth})" if pair.depth % step else ""
    inside_h = f"(h < {pair.hidden})" if pair.hidden != hidden else ""
    tiles = ceil(pair.width / columns / config.parts)
    inside_c = f"(c < {pair.width})" if pair.width != tiles * columns * config.parts else ""
    mask_out = _both("here", inside_c and f"{inside_c}[None, :]")
    inner, outer, residual = [], [], []
    if pair.inner_bias:
        inner.append(f"    total += tl.load(bias1 + h{_mask(inside_h)}).to(tl.float32)[None, :]")
    if pair.inner != "none":
        inner.append(f"    total = {_ACTIVATIONS[pair.inner].format('total')}")
    if pair.outer_bias:
        outer.append(f"        y += tl.load(bias2 + c{_mask(inside_c)}).to(tl.float32)[None, :]")
    if pair.outer != "none":
        outer.append(f"        y = {_ACTIVATIONS[pair.outer].format('y')}")
    if pair.residual:
        residual.append(
            f"        added = tl.load(residual + r * {pair.width} + c[None, :], mask={mask_out}, other=0.0)"
        )
        outer.append("        y += added.to(tl.float32)")
    return _SOURCE.format(
        kernel=KERNEL,
        parameters=", ".join(signature(pair)),
        share=f" // {config.parts}" if config.parts > 1 else "",
        part=f"    part = tl.program_id(0) % {config.parts}\n" if config.parts > 1 else "",
        rows=rows,
        columns=columns,
        step=step,
        depth=pair.depth,
        hidden=pair.hidden,
        padded=hidden,
        width=pair.width,
        tiles=tiles,
        own=f"part * {tiles} + " if config.parts > 1 else "",
        type=_TYPES[pair.dtype],
        mask_a=_both("here", inside_k and f"{inside_k}[None, :]"),
        mask_b=_mask(_both(inside_k and f"{inside_k}[:, None]", inside_h and f"{inside_h}[None, :]")),
        mask_w=_mask(_both(inside_h and f"{inside_h}[:, None]", inside_c and f"{inside_c}[None, :]")),
        mask_out=mask_out,
        inner=_lines(inner),
        outer=_lines(outer),
        residual=_lines(residual),
        residual_base=f"    residual += first.to(tl.int64) * {pair.width}\n" if pair.residual else "",
    )


def signature(pair: GemmPair) -> dict[str, str]:
    """Triton types of the kernel's parameters."""
    return dict.fromkeys((*pair.inputs, "out"), f"*{pair.dtype}") | {"rows": "i32"}


def grid_blocks(config: PairConfig, rows: int) -> int:
    """Thread blocks of a launch."""
    return ceil(rows / config.rows) * config.parts


def _both(*masks: str) -> str:
    return " & ".join(filter(None, masks))


def _mask(mask: str) -> str:
    return f", mask={mask}, other=0.0" if mask else ""


def _lines(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)
