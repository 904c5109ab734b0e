"""Each kind of attention node, lowered, against the contract's float64 definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from stof_onnx.attention.rewrite import replace_attention
from stof_onnx.attention.types import BiasKind, KvKind, MaskedRow
from stof_onnx.errors import StofError
from stof_onnx.graph.proto_graph import attributes_of
from stof_onnx.graph.save import save_model
from stof_onnx.kernels.select import Device
from stof_onnx.trt.lower import Lowered, LowerOptions, lower_file

from tests.rewrite.sites import Case, build, feeds, reference
from tests.trt.plugin_reference import StofAttention

SEQ = 150
Q, K = np.arange(SEQ)[:, None], np.arange(SEQ)[None]
CAUSAL = (K <= Q)[None, None]
WINDOW = (np.abs(Q - K) <= 9)[None, None]
ROWS_WITHOUT_KEYS = (WINDOW & (Q % 7 != 3)[None, None]).copy()
HEADS = np.stack([(np.abs(Q - K) <= w) for w in (5, 30, 150, 5)])[None]
ALIBI = -0.5 * np.abs(np.arange(2 * SEQ - 1) - SEQ + 1)[None] * np.array([[1.0], [0.5], [0.25], [0.1]])


def case(**changes: object) -> Case:
    base = {"heads": 4, "kv_heads": 4, "seq_q": SEQ, "seq_kv": SEQ, "allowed": WINDOW}
    return Case(**(base | changes))  # type: ignore[arg-type]


CASES = {
    "bhsd": case(),
    "bshd rank 3, grouped": case(layouts=("BSHD",) * 4, rank=3, kv_heads=2),
    "bshd rank 4, v wider": case(layouts=("BSHD",) * 4, v_dim=24),
    "mixed layouts": case(layouts=("BHSD", "BSHD", "BSHD", "BSHD"), kv_heads=1),
    "a mask a head": case(allowed=HEADS),
    "causal, dynamic": case(allowed=CAUSAL, dynamic=True),
    "no mask": case(allowed=None),
    "softcap": case(softcap=2.0),
    "relative bias": case(bias_kind=BiasKind.RELATIVE, bias=ALIBI.astype(np.float32), rel_rq=SEQ),
    "dense bias": case(bias_kind=BiasKind.DENSE, bias=np.sin(Q * 0.3 + K)[None, None].astype(np.float32)),
    "padding mask": case(kv_kind=KvKind.MASK),
    "padding length": case(kv_kind=KvKind.LENGTH, masked_row=MaskedRow.NAN),
    "rows without keys: zero": case(allowed=ROWS_WITHOUT_KEYS),
    "rows without keys: mean": case(allowed=ROWS_WITHOUT_KEYS, masked_row=MaskedRow.MEAN),
    "rows without keys: scores": case(allowed=ROWS_WITHOUT_KEYS, masked_row=MaskedRow.SCORES),
    "global rows": case(allowed=(WINDOW | (Q < 4)[None, None])),
}


@pytest.mark.parametrize(
    "change",
    [
        {"softcap": 0.5}, {"softcap": float("nan")}, {"bias_kind": "relative"}, {"kv_kind": "mask"},
        {"kv_kind": "zero"}, {"num_heads": 2}, {"num_kv_heads": 0}, {"num_kv_heads": 3}, {"num_kv_heads": 1},
        {"masked_row": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_a_node_whose_attributes_were_edited_is_left(change: dict[str, object], tmp_path: Path) -> None:
    """The plugin would follow them, where the function's body does not."""
    one = case(layouts=("BSHD",) * 4, rank=3)
    model, matches = build([one], tmp_path / "in.onnx")
    replace_attention(model, matches)
    save_model(model, tmp_path / "out.onnx")
    proto = onnx.load(str(tmp_path / "out.onnx"))
    (node,) = (n for n in proto.graph.node if n.op_type.startswith("StofAttention_"))
    for attribute in node.attribute:
        if attribute.name in change:
            attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, change[attribute.name]))
    onnx.save(proto, str(tmp_path / "out.onnx"))
    found = lower_file(tmp_path / "out.onnx", LowerOptions())
    assert [site.kernel for site in found.sites] == [""] and "edited" in found.sites[0].reason


def lowered(one: Case, folder: Path, options: LowerOptions) -> Lowered:
    model, matches = build([one], folder / "in.onnx")
    replace_attention(model, matches)
    save_model(model, folder / "out.onnx")
    return lower_file(folder / "out.onnx", options)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", CASES)
def test_node_equals_the_definition(tmp_path, rng, name, arch):
    one = CASES[name]
    given = feeds(one, 0, rng)
    sizes = {n: a.shape for n, a in given.by_name.items()} if one.dynamic else {}
    result = lowered(one, tmp_path, LowerOptions(device=Device(arch), opt_sizes=sizes, largest_sizes=sizes))
    assert result.plugins == 1, result.sites
    (node,) = (n for n in result.model.graph.node if n.op_type == "StofAttention")
    assert attributes_of(node)["plugin_namespace"] == "stof"
    (got,) = ReferenceEvaluator(result.model, new_ops=[StofAttention]).run(None, given.by_name)
    expected = reference(one, 0, given)
    np.testing.assert_allclose(got, expected.astype(np.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("bhsd", "block_sm90"), ("softcap", "block_sm80"), ("relative bias", "block_sm80"), ("padding mask", "block_sm80"),
     ("padding length", "block_sm90"), ("rows without keys: mean", "block_sm80")],
)  # fmt: skip
def test_kernel_of_each_kind(tmp_path, name, kernel):
    blocks = Device(90, kernels=(kernel,))
    assert lowered(CASES[name], tmp_path, LowerOptions(device=blocks)).sites[0].kernel == kernel
    if kernel == "block_sm80":
        assert lowered(CASES[name], tmp_path, LowerOptions()).sites[0].kernel != "block_sm90"


def test_fp32_engines_get_no_hopper_kernel(tmp_path):
    assert lowered(CASES["bhsd"], tmp_path, LowerOptions(precision="fp32")).sites[0].kernel != "block_sm90"


def hiding_bias(rng: np.random.Generator) -> np.ndarray:
    """A dense bias that hides half of the keys, and all of some rows."""
    bias = np.where(rng.random((1, 1, SEQ, SEQ)) < 0.5, -np.inf, 0.5).astype(np.float32)
    bias[..., Q[:, 0] % 11 == 4, :] = -np.inf
    return bias


@pytest.mark.parametrize("at_run_time", [False, True])
@pytest.mark.parametrize("masked_row", [MaskedRow.ZERO, MaskedRow.MEAN, MaskedRow.NAN])
def test_dense_bias_may_empty_rows(tmp_path, rng, masked_row, at_run_time):
    bias = hiding_bias(rng)
    one = case(bias_kind=BiasKind.DENSE, bias=bias, bias_at_run_time=at_run_time, masked_row=masked_row)
    result = lowered(one, tmp_path, LowerOptions())
    assert result.plugins == 1, result.sites
    given = feeds(one, 0, rng)
    (got,) = ReferenceEvaluator(result.model, new_ops=[StofAttention]).run(None, given.by_name)
    np.testing.assert_allclose(got, reference(one, 0, given).astype(np.float32), rtol=1e-4, atol=1e-5)


def test_dense_bias_beside_raw_scores_is_left_alone(tmp_path, rng):
    bias = hiding_bias(rng)
    one = case(bias_kind=BiasKind.DENSE, bias=bias, masked_row=MaskedRow.SCORES, allowed=ROWS_WITHOUT_KEYS)
    result = lowered(one, tmp_path, LowerOptions())
    assert result.plugins == 0
    assert "dense bias" in result.sites[0].reason
    given = feeds(one, 0, rng)
    (got,) = ReferenceEvaluator(result.model).run(None, given.by_name)
    np.testing.assert_allclose(got, reference(one, 0, given).astype(np.float32), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_sites_left_to_tensorrt_hold_dense_masks(tmp_path, rng, name):
    one = CASES[name]
    model, matches = build([one], tmp_path / "in.onnx")
    replace_attention(model, matches)
    save_model(model, tmp_path / "out.onnx")
    (site,) = lower_file(tmp_path / "out.onnx", LowerOptions()).sites
    result = lower_file(tmp_path / "out.onnx", LowerOptions(left=frozenset([site.name])))
    assert result.plugins == 0
    kinds = {node.op_type for node in result.model.graph.node}
    assert not kinds & {"StofAttention", "BitShift", "ScatterElements"}
    given = feeds(one, 0, rng)
    (got,) = ReferenceEvaluator(result.model).run(None, given.by_name)
    np.testing.assert_allclose(got, reference(one, 0, given).astype(np.float32), rtol=1e-4, atol=1e-5)


def test_damaged_arrays_are_refused(tmp_path):
    model, matches = build([CASES["bhsd"]], tmp_path / "in.onnx")
    replace_attention(model, matches)
    save_model(model, tmp_path / "out.onnx")
    proto = onnx.load(tmp_path / "out.onnx")
    (pointers,) = (i for i in proto.graph.initializer if "part_row_ptr" in i.name)
    values = onnx.numpy_helper.to_array(pointers).copy()
    values[0, -1] += 3
    pointers.CopyFrom(onnx.numpy_helper.from_array(values, pointers.name))
    onnx.save(proto, tmp_path / "out.onnx")
    with pytest.raises(StofError, match="part_row_ptr"):
        lower_file(tmp_path / "out.onnx", LowerOptions())
