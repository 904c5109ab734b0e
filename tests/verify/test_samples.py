"""Random inputs are valid for the model, and reach the sizes and paddings that break masks."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.mask import encode
from stof_onnx.options import DimRange
from stof_onnx.verify.roles import InputRole, Role, input_roles
from stof_onnx.verify.samples import VisibleKeys, make_samples

from tests.verify.models import VOCAB, attention

ROLES = [
    InputRole("ids", np.dtype(np.int64), ("batch", "sequence"), Role.IDS, VOCAB),
    InputRole("mask", np.dtype(np.int64), ("batch", "sequence"), Role.MASK),
]
RANGES = {
    "ids": (DimRange(1, 3, 4), DimRange(2, 32, 64)),
    "mask": (DimRange(1, 3, 4), DimRange(2, 32, 64)),
}


def test_roles_come_from_the_graph() -> None:
    roles = {r.name: r for r in input_roles(attention(), [])}
    assert roles["ids"].role is Role.IDS and roles["ids"].limit == VOCAB
    assert roles["attention_mask"].role is Role.MASK


def test_padding_is_known_from_the_site_not_the_name() -> None:
    model = attention()
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "attention_mask":
                node.input[i] = "t1"
    model.graph.input[1].name = "t1"
    hidden = next(n.output[0] for n in model.graph.node if n.op_type == "Cast")
    assert {r.name: r.role for r in input_roles(model, [hidden])} == {"ids": Role.IDS, "t1": Role.MASK}


def test_ids_that_index_two_tables_fit_the_smaller() -> None:
    tables = [numpy_helper.from_array(np.zeros((n, 4), np.float32), f"t{n}") for n in (100, 7)]
    nodes = [
        helper.make_node("Cast", ["ids"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Gather", ["t100", "wide"], ["a"]),
        helper.make_node("Gather", ["t7", "ids"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT32, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4])],
        tables,
    )
    (role,) = input_roles(helper.make_model(graph), [])
    assert (role.role, role.limit) == (Role.IDS, 7)


def test_sizes_cover_the_range(fresh_rng: np.random.Generator) -> None:
    samples = make_samples(ROLES, RANGES, 3, None, fresh_rng)
    shapes = [s.feeds["ids"].shape for s in samples]
    assert shapes[:3] == [(3, 32), (4, 64), (1, 2)]
    assert all(s.feeds["mask"].shape == s.feeds["ids"].shape for s in samples)
    assert all(s.feeds["ids"].min() >= 0 and s.feeds["ids"].max() < VOCAB for s in samples)


def test_paddings(fresh_rng: np.random.Generator) -> None:
    samples = {s.what.split(":")[0]: s.feeds["mask"] for s in make_samples(ROLES, {}, 1, None, fresh_rng)}
    assert samples["no padding"].all()
    right, left = samples["padded right"], samples["padded left"]
    assert (np.diff(right, axis=1) <= 0).all() and right[:, 0].all() and (right == 0).any()
    assert (np.diff(left, axis=1) >= 0).all() and left[:, -1].all() and (left == 0).any()
    assert (samples["one entry all padding"].sum(axis=1) == 0).sum() == 1
    assert (samples["padded at random"].sum(axis=1) > 0).all()


def _dilated(length: int) -> np.ndarray:
    distance = np.abs(np.subtract.outer(np.arange(length), np.arange(length)))
    return (distance <= 8) & (distance % 2 == 0)


@pytest.mark.parametrize("_", range(20))
def test_padding_keeps_a_key_for_every_row_when_asked(_: int, fresh_rng: np.random.Generator) -> None:
    keep = VisibleKeys([encode(_dilated(64))])
    padded = 0
    for sample in make_samples(ROLES, RANGES, 4, keep, fresh_rng):
        mask = sample.feeds["mask"].astype(bool)
        allowed = _dilated(mask.shape[1])
        assert (allowed[None] & mask[:, None]).any(axis=2).all(), sample.what
        padded += int((~mask).sum())
    assert padded


def test_sizes_that_are_sums() -> None:
    roles = [
        InputRole("past", np.dtype(np.float32), ("batch", "past"), Role.VALUES),
        InputRole("ids", np.dtype(np.int64), ("batch", "seq"), Role.IDS, 5),
        InputRole("mask", np.dtype(np.int64), ("batch", "past + seq"), Role.MASK),
    ]
    ranges = {"past": (DimRange(2, 2, 2), DimRange(7, 7, 7)), "ids": (DimRange(2, 2, 2), DimRange(5, 5, 5))}
    for order in (roles, roles[::-1]):
        for sample in make_samples(order, ranges, 1, None, np.random.default_rng(0)):
            assert sample.feeds["mask"].shape == (2, 12)


def test_inputs_with_defaults_are_not_fed() -> None:
    model = attention()
    model.graph.input.append(helper.make_tensor_value_info("wq", TensorProto.FLOAT, [16, 16]))
    assert [r.name for r in input_roles(model, [])] == ["ids", "attention_mask"]
    assert isinstance(model, onnx.ModelProto)
