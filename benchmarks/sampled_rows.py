"""A one-layer encoder in float64 on sampled query rows, for lengths whose score matrices do not fit in memory."""

from __future__ import annotations

import math

import numpy as np
from onnx import numpy_helper

from benchmarks.encoder import EncoderSpec, build_encoder

_erf = np.vectorize(math.erf, otypes=[np.float64])


def sampled_output(spec: EncoderSpec, mask: np.ndarray, x: np.ndarray, rows: np.ndarray) -> np.ma.MaskedArray:
    """Output [B, S, hidden] of build_encoder(spec, mask) on `x` at the sequence positions `rows`, masked elsewhere.

    A row attends all of its keys: only queries are sampled. With one layer nothing else reads the other rows.
    """
    if spec.layers != 1 or spec.pre_norm or spec.projections != "separate":
        raise ValueError("one post-norm layer with separate projections")
    w = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in build_encoder(spec, None).graph.initializer}
    batch, seq, hidden = x.shape
    picked = np.zeros((batch, seq, hidden))
    for b in range(batch):
        every, chosen = x[b].astype(np.float64), x[b, rows].astype(np.float64)
        q, k, v = (
            _dense(source, w, part).reshape(len(source), spec.heads, -1).transpose(1, 0, 2)
            for source, part in ((chosen, "q"), (every, "k"), (every, "v"))
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(hidden // spec.heads)
        scores[:, ~mask[rows]] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = (p / p.sum(axis=-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(rows), hidden)
        middle = _norm(_dense(attended, w, "out") + chosen, w, "ln1")
        inner = _dense(middle, w, "fc1")
        inner = inner * (1 + _erf(inner / np.sqrt(2))) / 2
        picked[b, rows] = _norm(_dense(inner, w, "fc2") + middle, w, "ln2")
    hidden_rows = np.ones(seq, bool)
    hidden_rows[rows] = False
    return np.ma.array(picked, mask=np.broadcast_to(hidden_rows[None, :, None], picked.shape))


def _dense(x: np.ndarray, w: dict[str, np.ndarray], part: str) -> np.ndarray:
    return x @ w[f"layer0/{part}/w"] + w[f"layer0/{part}/b"]


def _norm(x: np.ndarray, w: dict[str, np.ndarray], part: str) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normal * w[f"layer0/{part}/scale"] + w[f"layer0/{part}/shift"]
