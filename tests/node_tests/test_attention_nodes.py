"""The `Attention` node tests of the onnx package: replaced and equal to what they ship, or left alone for a reason."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.node_tests.onnx_cases import NodeTest, attention_tests
from tests.node_tests.outcome import evaluate
from tests.node_tests.table import render, run_all, written

TESTS = attention_tests()
ALLOWED = ("past keys and values", "is used", "have another consumer", "softcap", "nonpad_kv_seqlen")
RELEASE_1_19 = onnx.__version__.startswith("1.19.")


@pytest.mark.parametrize("test", TESTS, ids=[t.name for t in TESTS])
def test_replaced_and_equal_or_left_alone(test: NodeTest, tmp_path: Path) -> None:
    outcome = evaluate(test, tmp_path)
    assert not outcome.errors
    if not outcome.replaced:
        assert any(reason in outcome.refused for reason in ALLOWED), outcome.refused
        assert _may_be_left_alone(test), outcome.refused


def _may_be_left_alone(test: NodeTest) -> bool:
    """A KV cache, score outputs, or softcap beside a mask; the guard of later releases' decomposed form."""
    inputs = {i.name for i in test.model.graph.input}
    outputs = {o.name for o in test.model.graph.output}
    cache = "past_key" in inputs or ("nonpad_kv_seqlen" in inputs and not RELEASE_1_19)
    capped = "softcap" in test.name and ("attn_mask" in inputs or "causal" in test.name)
    guarded = test.name.endswith("_expanded") and not RELEASE_1_19
    return cache or capped or guarded or "qk_matmul_output" in outputs


@pytest.mark.skipif(not RELEASE_1_19, reason="the document's table is that of onnx 1.19")
def test_table_is_current() -> None:
    outcomes = run_all()
    assert len(outcomes) == 124
    assert written() == render(outcomes), "run `python -m tests.node_tests.table` and commit the document"
