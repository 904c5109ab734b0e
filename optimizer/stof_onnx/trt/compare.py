"""Whether an engine computes what ONNX Runtime does, judged by what the plain engine of the same precision needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

_FACTOR = 2.0  # our error may be this many times the plain engine's
_FLOOR = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 3e-2}  # and this much of the largest value in any case


@dataclass(frozen=True)
class EngineError:
    """The largest absolute difference from the reference, and that over the largest absolute reference value.

    `nonfinite`: positions where one side is finite and the other is not.
    """

    max_abs: float
    relative: float
    nonfinite: int


def measure(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> EngineError:
    """The worst error over all outputs.

    A reference with fewer entries along the first axis covers the leading ones; a masked array covers what it does not
    mask.
    """
    found = []
    for name, expected in reference.items():
        want, got = expected.astype(np.float64), outputs[name].astype(np.float64)
        if want.ndim and want.shape[1:] == got.shape[1:] and len(want) < len(got):
            got = got[: len(want)]
        if want.shape != got.shape:
            return EngineError(float("inf"), float("inf"), int(want.size))
        if isinstance(want, np.ma.MaskedArray):
            seen = ~np.ma.getmaskarray(want)
            want, got = want.data[seen], got[seen]
        both = np.isfinite(want) & np.isfinite(got)
        agree = both | (want == got) | (np.isnan(want) & np.isnan(got))
        error = float(np.abs(want[both] - got[both]).max(initial=0.0))
        scale = float(np.abs(want)[np.isfinite(want)].max(initial=0.0)) or 1.0
        found.append(EngineError(error, error / scale, int((~agree).sum())))
    return worst(found)


def worst(errors: Iterable[EngineError]) -> EngineError:
    """The largest of each figure; of `nonfinite` the sum."""
    total = EngineError(0.0, 0.0, 0)
    for error in errors:
        total = EngineError(
            max(total.max_abs, error.max_abs), max(total.relative, error.relative), total.nonfinite + error.nonfinite
        )
    return total


def passes(error: EngineError, plain: EngineError | None, precision: str) -> bool:
    """The rule: relative error at most twice the plain engine's or the floor of the precision, whichever is larger.

    Where there is no plain engine (TensorRT 8.6 builds none whose scores have 2^31 elements), its error is taken to be
    the floor: what plain engines of BERT and GPT-2 need.
    """
    floor = _FLOOR[precision]
    most = max(floor, _FACTOR * (plain.relative if plain is not None else floor))
    allowed_nonfinite = plain.nonfinite if plain is not None else 0
    return error.nonfinite <= allowed_nonfinite and error.relative <= most
