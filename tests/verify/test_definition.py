"""Attention spelled out equals the node tests of onnx, and keeps rows of lowest finite masks ordinary."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from stof_onnx.verify.definition import spell_out_attention

ROOT = os.path.join(os.path.dirname(onnx.__file__), "backend/test/data/node")
CASES = [c for c in sorted(os.listdir(ROOT)) if c.startswith("test_attention_") and not c.endswith("_expanded")]


def _data(case: str, kind: str) -> list[np.ndarray]:
    found = []
    for i in range(len(glob.glob(f"{ROOT}/{case}/test_data_set_0/{kind}_*.pb"))):
        tensor = onnx.TensorProto()
        tensor.ParseFromString(Path(f"{ROOT}/{case}/test_data_set_0/{kind}_{i}.pb").read_bytes())
        found.append(numpy_helper.to_array(tensor))
    return found


def test_node_tests() -> None:
    spelled = 0
    for case in CASES:
        model = onnx.load(f"{ROOT}/{case}/model.onnx")
        spell_out_attention(model)
        if any(n.op_type == "Attention" for n in model.graph.node):
            continue
        feeds = dict(zip([i.name for i in model.graph.input], _data(case, "input"), strict=True))
        got = ort.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
        want = _data(case, "output")[0]
        wide = 1e-2 if want.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(got, want, rtol=wide, atol=wide, err_msg=case)
        spelled += 1
    assert spelled >= 20


@pytest.mark.parametrize(("value", "mean"), [(np.finfo(np.float32).min, True), (-np.inf, False)])
def test_rows_without_keys(value: float, mean: bool, fresh_rng: np.random.Generator) -> None:
    q, k, v = (fresh_rng.standard_normal((1, 2, 5, 8)).astype(np.float32) for _ in range(3))
    mask = np.zeros((5, 5), np.float32)
    mask[3] = value
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(x.shape)) for n, x in
              (("q", q), ("k", k), ("v", v), ("m", mask))]  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Attention", ["q", "k", "v", "m"], ["y"])],
        "g",
        values,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 5, 8])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    feeds = {"q": q, "k": k, "v": v, "m": mask}
    want = ReferenceEvaluator(model).run(None, feeds)[0]
    spell_out_attention(model)
    got = ort.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    rows = [0, 1, 2, 4]
    np.testing.assert_allclose(got[:, :, rows], want[:, :, rows], rtol=1e-5, atol=1e-6)
    expected = v.mean(axis=2) if mean else np.zeros_like(got[:, :, 3])
    np.testing.assert_allclose(got[:, :, 3], expected, rtol=1e-5, atol=1e-6)
