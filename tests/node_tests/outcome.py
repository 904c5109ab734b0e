"""Runs one shipped node test through the optimizer and compares the result with the outputs it ships."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from ml_dtypes import bfloat16
from onnx.reference import ReferenceEvaluator
from stof_onnx.attention.match import find_attention
from stof_onnx.attention.rewrite import replace_attention
from stof_onnx.attention.types import AttentionMatch, BiasKind, KvKind
from stof_onnx.graph.model import load_model
from stof_onnx.graph.save import save_model
from stof_onnx.options import OptimizeOptions

from tests.node_tests.onnx_cases import NodeTest


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Attributes:
        name: of the test.
        replaced: what the node is now, in a few words; empty when it was left alone.
        refused: why it was left alone; empty when it was replaced.
        errors: evaluator and largest excess over the test's tolerance; empty when all outputs agree.
    """

    name: str
    replaced: str
    refused: str
    errors: tuple[str, ...] = ()


def evaluate(test: NodeTest, folder: Path) -> Outcome:
    """Optimizes the test's model into `folder`; where something was replaced, checks every data set.

    The reference evaluator must agree, and so must ONNX Runtime wherever it runs the model.
    """
    source = folder / "node.onnx"
    onnx.save(test.model, source)
    model = load_model(source)
    matches, refusals = find_attention(model, OptimizeOptions())
    if not matches:
        return Outcome(test.name, "", "; ".join(r.reason for r in refusals) or "no attention found")
    replace_attention(model, matches)
    path = folder / "optimized.onnx"
    save_model(model, path)
    errors: list[str] = []
    for inputs, expected in test.data_sets:
        for evaluator, outputs in _run(path, inputs).items():
            for actual, wanted in zip(outputs, expected, strict=True):
                errors += [f"{evaluator}: {e}" for e in _difference(test, actual, wanted)]
    return Outcome(test.name, "; ".join(_words(m) for m in matches), "", tuple(errors))


def _run(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    session = ort.InferenceSession(path)
    results = {}
    if not any(array.dtype == bfloat16 for array in inputs.values()):  # its Python interface takes no such arrays
        results["ONNX Runtime"] = session.run(None, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # softmax of rows of -inf
        results["reference evaluator"] = ReferenceEvaluator(onnx.load(path)).run(None, inputs)
    return results


def _difference(test: NodeTest, actual: np.ndarray, wanted: np.ndarray) -> list[str]:
    if actual.shape != wanted.shape or actual.dtype != wanted.dtype:
        return [f"{actual.dtype}{list(actual.shape)} instead of {wanted.dtype}{list(wanted.shape)}"]
    # A step of bfloat16 is up to 2^-7 of the number, and the expected outputs are rounded after every operator.
    rtol = max(test.rtol, 2**-6) if wanted.dtype == bfloat16 else test.rtol
    try:
        np.testing.assert_allclose(actual.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=test.atol)
    except AssertionError as error:
        return [" ".join(str(error).split())]
    return []


def _words(match: AttentionMatch) -> str:
    parts = []
    if match.num_heads != match.num_kv_heads:
        parts.append("grouped heads")
    if match.mask is not None:
        parts.append("static mask")
    if match.kv_mask.kind is not KvKind.NONE:
        parts.append(f"padding by {match.kv_mask.kind.value}")
    if match.bias.kind is not BiasKind.NONE:
        parts.append(f"{match.bias.kind.value} bias")
    if match.softcap:
        parts.append("softcap")
    return ", ".join(parts) or "no mask"
