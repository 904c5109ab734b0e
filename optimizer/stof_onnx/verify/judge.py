"""The tolerance rule: when two tensors count as the same result.

Floating point tensors agree when the largest difference is within `DIRECT[dtype]` of the largest magnitude in the
original's tensor. Where it is not, a run of the original in higher precision decides: the optimized model may have at
most twice the original's own error against it, plus `FLOOR[dtype]` of the magnitude. The reference only counts while
the original's own error is small (`SANE`): beyond that higher precision changes what the model means, for instance
where a mask constant no longer absorbs the score. Other tensors must be equal. NaN equals NaN, and infinity equals
infinity of the same sign; anything else against them fails.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stof_onnx.verify.result import OutputError

DIRECT = {"float64": 1e-10, "float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
FLOOR = {"float64": 4e-15, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
SANE = 0.05


def rule(atol: float | None, rtol: float | None) -> str:
    """The tolerance in words, for the report."""
    if atol is not None or rtol is not None:
        return f"|optimized - original| <= {atol or 0:g} + {rtol or 0:g} * |original|, each element"
    direct = ", ".join(f"{name} {value:g}" for name, value in DIRECT.items())
    return (
        f"largest difference within ({direct}) of the largest magnitude; where exceeded, at most twice the original's "
        "own error against a run in higher precision, plus a floor; integers and booleans equal"
    )


def compare(
    error: OutputError,
    original: np.ndarray,
    optimized: np.ndarray,
    reference: Callable[[], np.ndarray | None],
    atol: float | None = None,
    rtol: float | None = None,
) -> None:
    """Adds one sample's tensors to `error`.

    Args:
        error: accumulates the largest errors, and the gravest problem.
        reference: runs the original in higher precision and returns this tensor, None where that is not possible.
        atol, rtol: when either is given, the tolerance of each element instead of the rule above.
    """
    if original.shape != optimized.shape:
        error.fail(f"shape {list(optimized.shape)} instead of {list(original.shape)}")
        return
    if original.dtype != optimized.dtype:
        error.fail(f"dtype {optimized.dtype} instead of {original.dtype}")
        return
    if not _is_float(original):
        differ = int(np.count_nonzero(original != optimized))
        if differ:
            error.fail(f"{differ} of {original.size} elements differ")
        return
    want, got = _wide(original), _wide(optimized)
    finite = np.isfinite(want)
    odd = ~finite | ~np.isfinite(got)
    wrong = odd & ~((np.isnan(want) & np.isnan(got)) | (want == got))
    if wrong.any():
        where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        what = f"{got[where]} instead of {want[where]} at {[int(i) for i in where]}"
        error.fail(f"{what} ({int(wrong.sum())} elements)")
        return
    if not finite.any():
        return
    difference = np.abs(np.where(finite, got - np.where(finite, want, 0), 0))
    scale = float(np.abs(want[finite]).max())
    worst = float(difference.max())
    error.max_abs = max(error.max_abs, worst)
    error.max_rel = max(error.max_rel, worst / scale if scale else (np.inf if worst else 0.0))
    if atol is not None or rtol is not None:
        limit = (atol or 0.0) + (rtol or 0.0) * np.abs(np.where(finite, want, 0))
        error.limit = max(error.limit, float(limit.max()))
        if (difference > limit).any():
            error.fail(f"differs by up to {worst:.3g}, more than the tolerance asked for", worst)
        return
    name = _dtype_name(original)
    error.limit = max(error.limit, DIRECT[name] * scale)
    if worst > DIRECT[name] * scale:
        _against_reference(error, want, got, finite, scale, name, reference())


def _against_reference(
    error: OutputError,
    want: np.ndarray,
    got: np.ndarray,
    finite: np.ndarray,
    scale: float,
    dtype: str,
    reference: np.ndarray | None,
) -> None:
    worst = float(np.abs(got[finite] - want[finite]).max())
    what = f"differs by up to {worst:.3g} at a magnitude of {scale:.3g}"
    if reference is None:
        error.fail(what, worst)
        return
    truth = _wide(reference)
    usable = finite & np.isfinite(truth)
    own = float(np.abs(want[usable] - truth[usable]).max(initial=0.0))
    ours = float(np.abs(got[usable] - truth[usable]).max(initial=0.0))
    error.own_error = max(error.own_error or 0.0, own)
    error.optimized_error = max(error.optimized_error or 0.0, ours)
    if usable.sum() < finite.sum() or own > SANE * scale:
        error.fail(f"{what}; higher precision gives another result, so it can not decide", worst)
    elif ours > 2 * own + FLOOR[dtype] * scale:
        errors = f"error {ours:.3g} against higher precision, the original's is {own:.3g}"
        error.fail(f"{what}; {errors}", worst)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def _dtype_name(array: np.ndarray) -> str:
    return str(array.dtype)


def _is_float(array: np.ndarray) -> bool:
    return _dtype_name(array) in DIRECT
