"""The StofFusedRegion node in float64, from the contract of docs/architecture.md alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from stof_onnx.kernels.gemm_pair import GemmPair
from stof_onnx.kernels.triton_rows import Config, Program, RowProgram, reference

_erf = np.vectorize(math.erf)
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_erf": lambda x: x * (1 + _erf(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
}


def as_text(items: Sequence[tuple[Program, Config, int]], arch: int) -> list[str]:
    """In place of compiled programs: what they compute, and for which rank."""
    return [
        json.dumps({"pair": isinstance(program, GemmPair), "program": program.to_json(), "rank": rank})
        for program, _, rank in items
    ]


def rotated(y: np.ndarray, rotation: np.ndarray, columns: int, head_dim: int) -> np.ndarray:
    """The first columns' heads, pairs of neighbours turned by the angle of the row's position."""
    assert rotation.shape[1] == head_dim
    rows = y.reshape(-1, y.shape[-1])
    turns = rotation[np.arange(len(rows)) % len(rotation)].reshape(len(rows), 1, -1, 2) @ [1, 1j]
    pairs = rows[:, :columns].reshape(len(rows), -1, head_dim // 2, 2) @ [1, 1j]
    turned = pairs * turns
    both = np.stack([turned.real, turned.imag], -1).reshape(len(rows), columns)
    return np.concatenate([both, rows[:, columns:]], 1).reshape(y.shape)


def region(inputs: list[np.ndarray], a: dict[str, Any]) -> list[np.ndarray]:
    """The outputs of one node."""
    x = inputs[0].astype(np.float64)
    if a["template"] == "cubin":
        held = json.loads(a["program"])
        assert x.ndim == held["rank"], "a program is for tensors of one rank"
        if held["pair"]:
            return [gemm_pair(GemmPair.from_json(held["program"]), x, inputs[1:])]
        program = RowProgram.from_json(held["program"])
        arrays = [v.reshape(-1, program.cols) if v.ndim > 1 else v for v in inputs]
        return [y.reshape(x.shape) for y in reference(program, arrays)]
    rest = [value.astype(np.float64) for value in inputs[1:]]
    if a["template"] == "gemm_norm":
        return gemm_norm(x, rest, a)
    act = ACTIVATIONS[a["activation"]]
    if a["template"] == "gated_mlp":
        gate, up = x @ rest[0], x @ rest[1]
        return [act(gate + rest[2]) * (up + rest[3]) if a["has_bias"] else act(gate) * up]
    y = x @ rest.pop(0)
    if a["has_bias"]:
        bias = rest.pop(0)
        assert bias.ndim == 1
        y = y + bias
    if a.get("rotated_columns"):
        return [rotated(y, rest.pop(0), a["rotated_columns"], a["head_dim"])]
    y = act(y)
    if a["has_residual"]:
        residual = rest.pop(0)
        assert residual.shape == y.shape
        y = y + residual
    assert not rest
    return [y]


def gemm_pair(pair: GemmPair, x: np.ndarray, rest: list[np.ndarray]) -> np.ndarray:
    """Two products in a row, not rounded in between."""
    (first, second), rest = rest[:2], rest[2:]
    assert first.shape == (x.shape[-1], pair.hidden) == (pair.depth, pair.hidden)
    assert second.shape == (pair.hidden, pair.width)
    assert len(rest) == pair.inner_bias + pair.outer_bias + pair.residual
    biases = [rest.pop(0) if flag else np.zeros(1) for flag in (pair.inner_bias, pair.outer_bias)]
    assert all(bias.ndim == 1 for bias in biases)
    hidden = ACTIVATIONS[pair.inner](x @ first.astype(np.float64) + biases[0])
    y = ACTIVATIONS[pair.outer](hidden @ second.astype(np.float64) + biases[1])
    return y + rest[0] if pair.residual else y


def gemm_norm(x: np.ndarray, rest: list[np.ndarray], a: dict[str, Any]) -> list[np.ndarray]:
    """The normalised rows of x w + bias + residual, and the sum where it is kept."""
    total = x @ rest.pop(0)
    if a["has_bias"]:
        total = total + rest.pop(0)
    if a["has_residual"]:
        residual = rest.pop(0)
        assert residual.shape == total.shape
        total = total + residual
    centred = total - total.mean(-1, keepdims=True) if a["kind"] == "layer_norm" else total
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + a["epsilon"])
    for name, operation in (("has_scale", np.multiply), ("has_shift", np.add)):
        if a[name]:
            vector = rest.pop(0)
            assert vector.ndim == 1
            y = operation(y, vector)
    assert not rest
    return [y, total] if a["keep_sum"] else [y]


class StofFusedRegion(OpRun):
    """For onnx's reference evaluator."""

    op_domain = "stof"

    def _run(self, *inputs: np.ndarray, **_: Any) -> tuple[np.ndarray, ...]:
        attributes = {x.name: getattr(self, x.name) for x in self.onnx_node.attribute}
        return tuple(y.astype(np.float32) for y in region(list(inputs), attributes))
