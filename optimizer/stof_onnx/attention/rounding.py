"""Whether a run-time bias means the same when it is added in half precision (the original) and in float32 (ours).

Beside a finite mask constant a score is rounded: -65504 in float16 leaves steps of 32. In a row that has other keys no
one sees that; in a row of nothing but such constants it decides the result, so there the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.masked_row import KEEPS, SWALLOWS, half_ulp, mask_threshold
from stof_onnx.attention.movement import MOVES, is_standard
from stof_onnx.graph.fold import Folder
from stof_onnx.graph.shapes import subgraphs_of

NO_EMPTY_ROWS = "assumed, as asked: no input hides all keys of a row"
_HALF = ("float16", "bfloat16")
_PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv", "LayerNormalization")  # what they give is content, no mask
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Max", "Min", "Sum", "Cast", "CastLike", "Clip", "Where")
_TENSORS = 400  # looked at above one bias


def lossy_constant(bias: gs.Tensor, dtype: np.dtype, folder: Folder, alone: bool = True) -> tuple[float | None, bool]:
    """The first mask constant that `bias` can hold and that scores of `dtype` do not survive, and whether all are seen.

    Args:
        bias: the tensor added, at run time or static.
        dtype: the coarsest type the sum passes through.
        alone: no other mask hides keys; a static bias then empties only the rows that hold nothing but constants.

    Returns:
        (None, True) where float32 gives the same, (None, False) where that hangs on the values of a run-time input.
    """
    if np.dtype(dtype).name not in _HALF or folder.dtype(bias) == np.bool_:
        return None, True
    if folder.is_static(bias):
        value = folder.value(bias)
        if value is None:
            return None, False
        if alone:
            value = value[(value <= mask_threshold(dtype)).all(axis=-1)]
        return _lossy(value, dtype), True
    complete = True
    for part in _parts(bias, folder):
        if not folder.is_static(part):
            complete = False
            continue
        value = folder.value(part)
        found = None if value is None else _lossy(value, dtype)
        complete = complete and value is not None
        if found is not None:
            return found, True
    return None, complete


def lossy_reason(constant: float, dtype: np.dtype) -> str:
    """The sentence of the refusal."""
    return (
        f"{constant:g} added in {np.dtype(dtype).name} keeps only part of each score in a row without keys "
        "(--assume-no-empty-rows where padding never hides every key of a query)"
    )


def unknown_note(bias: gs.Tensor, dtype: np.dtype) -> str:
    """The line of the report for a bias whose values nobody knows."""
    return (
        f"'{bias.name}' is added in float32, in the original in {np.dtype(dtype).name}: a row in which it lowers every "
        "key by 10000 or more (but not to -inf) is rounded there and not here"
    )


def _lossy(value: np.ndarray, dtype: np.dtype) -> float | None:
    """An entry beside which a score is rounded in `dtype` and not swallowed in float32 too."""
    with np.errstate(over="ignore"):
        rounded = np.unique(np.asarray(value).astype(dtype).astype(np.float64))
    large = rounded[np.isfinite(rounded) & (np.abs(rounded) >= -mask_threshold(dtype))]
    single = np.dtype(np.float32)
    return next((float(v) for v in large if half_ulp(v, dtype) > KEEPS and half_ulp(v, single) < SWALLOWS), None)


def _parts(bias: gs.Tensor, folder: Folder) -> Iterator[gs.Tensor]:
    """What the values of `bias` are made of: static tensors, and run-time numbers that nothing is known about."""
    stack, seen = [folder.resolve(bias)], set[int]()
    while stack:
        tensor = stack.pop()
        if id(tensor) in seen or tensor.is_empty() or folder.dtype(tensor) == np.bool_:
            continue
        seen.add(id(tensor))
        node = tensor.inputs[0] if tensor.inputs else None
        if folder.is_static(tensor):
            yield tensor
        elif node is None or not is_standard(node) or subgraphs_of(node) or len(seen) > _TENSORS:
            if _is_float(tensor, folder):
                yield tensor
        elif node.op in _PRODUCTS:
            yield tensor
        elif node.op in MOVES:
            stack.append(folder.resolve(node.inputs[0]))
        else:
            inputs = [folder.resolve(t) for t in node.inputs]
            stack += [t for t in inputs if node.op in _ARITHMETIC or _is_float(t, folder)]


def _is_float(tensor: gs.Tensor, folder: Folder) -> bool:
    dtype = folder.dtype(tensor)
    return dtype is None or np.dtype(dtype).kind not in "iub"
