"""Rotary embeddings inside packed projections: found however they are written, left alone where anything differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from stof_models.export import export_model
from stof_models.options import ExportOptions
from stof_onnx.graph.proto_graph import attributes_of
from stof_onnx.kernels.select import Device
from stof_onnx.trt.lower import Lowered, LowerOptions
from stof_onnx.trt.rotary import paired

from benchmarks.encoder import EncoderSpec, build_encoder
from tests.trt.plugin_reference import StofAttention
from tests.trt.region_reference import StofFusedRegion
from tests.trt.test_region_nodes import exact

SEQ, WIDTH, DIM, LAYERS = 40, 64, 16, 2
MASK = np.tril(np.ones((SEQ, SEQ), bool))
HOPPER = LowerOptions(device=Device(90))
ANGLES = np.outer(np.arange(SEQ), 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2)))


class Nodes:
    """Collects what stands in for a rotation."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.nodes, self.count = model, [], 0

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: object) -> list[str]:
        self.count += 1
        names = [f"rot/{self.count}/{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=names[0], **attributes))
        return names

    def constant(self, value: np.ndarray) -> str:
        self.count += 1
        self.model.graph.initializer.append(numpy_helper.from_array(value, f"rot/{self.count}"))
        return f"rot/{self.count}"

    def floats(self, value: np.ndarray) -> str:
        return self.constant(value.astype(np.float32))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))


def turned(n: Nodes, x: str, cos: str, sin: str) -> str:
    """x cos + rotate_half(x) sin, as transformers has it."""
    first = n.op("Slice", x, n.ints(0), n.ints(DIM // 2), n.ints(3))[0]
    second = n.op("Slice", x, n.ints(DIM // 2), n.ints(2**63 - 1), n.ints(-1), n.ints(1))[0]
    half = n.op("Concat", n.op("Neg", second)[0], first, axis=-1)[0]
    return n.op("Add", n.op("Mul", x, cos)[0], n.op("Mul", half, sin)[0])[0]


def tables(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    both = np.concatenate([angles, angles], -1)[None, None]
    return np.cos(both), np.sin(both)


def slices(n: Nodes, x: str, part: str) -> str:
    return turned(n, x, *map(n.floats, tables(ANGLES)))


def halves(n: Nodes, x: str, part: str) -> str:
    """Each half by itself, with tables of half the width."""
    cos, sin = n.floats(np.cos(ANGLES)), n.floats(np.sin(ANGLES))
    a, b = n.op("Split", x, outputs=2, axis=-1)
    first = n.op("Sub", n.op("Mul", a, cos)[0], n.op("Mul", sin, b)[0])[0]
    second = n.op("Add", n.op("Mul", a, sin)[0], n.op("Mul", b, cos)[0])[0]
    return n.op("Concat", first, second, axis=3)[0]


def computed(n: Nodes, x: str, part: str) -> str:
    """Angles from the length that a Shape node tells, and a scale on both tables (YaRN)."""
    length = n.op("Gather", n.op("Shape", "x")[0], n.constant(np.array(1)), axis=0)[0]
    positions = n.op("Range", n.constant(np.array(0)), length, n.constant(np.array(1)))[0]
    column = n.op("Unsqueeze", n.op("Cast", positions, to=1)[0], n.ints(-1))[0]
    angles = n.op("Mul", column, n.floats(ANGLES[1]))[0]
    both, scale = n.op("Concat", angles, angles, axis=-1)[0], n.floats(np.array(1.25))
    cos, sin = (n.op("Mul", n.op(kind, both)[0], scale)[0] for kind in ("Cos", "Sin"))
    return turned(n, x, cos, sin)


def neighbours(n: Nodes, x: str, part: str) -> str:
    """Pairs 2j, 2j + 1, as GPT-J has them."""
    split = n.op("Reshape", x, n.ints(0, 0, 0, DIM // 2, 2))[0]
    a, b = n.op("Split", split, outputs=2, axis=-1)
    cos, sin = n.floats(np.cos(ANGLES)[..., None]), n.floats(np.sin(ANGLES)[..., None])
    first = n.op("Sub", n.op("Mul", a, cos)[0], n.op("Mul", b, sin)[0])[0]
    second = n.op("Add", n.op("Mul", a, sin)[0], n.op("Mul", b, cos)[0])[0]
    return n.op("Reshape", n.op("Concat", first, second, axis=-1)[0], n.ints(0, 0, 0, DIM))[0]


def other_angles_for_k(n: Nodes, x: str, part: str) -> str:
    return turned(n, x, *map(n.floats, tables(ANGLES * (1 if part == "q" else 1.01))))


def unequal_halves(n: Nodes, x: str, part: str) -> str:
    cos, sin = tables(ANGLES)
    cos[0, 0, 3, -1] += 0.01
    return turned(n, x, n.floats(cos), n.floats(sin))


def one_head_differs(n: Nodes, x: str, part: str) -> str:
    cos, sin = (np.repeat(t, WIDTH // DIM, 1) for t in tables(ANGLES))
    sin[0, 2, 5, 1] += 0.01
    return turned(n, x, n.floats(cos), n.floats(sin))


def not_linear(n: Nodes, x: str, part: str) -> str:
    y = slices(n, x, part)
    return n.op("Add", y, n.op("Mul", n.op("Mul", y, y)[0], n.floats(np.array(1e-2)))[0])[0]


def with_a_norm(n: Nodes, x: str, part: str) -> str:
    """As Qwen 3 and Gemma 3: no rotation of a projection alone."""
    mean = n.op("ReduceMean", n.op("Mul", x, x)[0], axes=[-1])[0]
    return slices(n, n.op("Div", x, n.op("Sqrt", mean)[0])[0], part)


def by_the_batch(n: Nodes, x: str, part: str) -> str:
    """Angles that grow with the batch, which only run time knows."""
    batch = n.op("Cast", n.op("Gather", n.op("Shape", "x")[0], n.constant(np.array(0)), axis=0)[0], to=1)[0]
    angles = n.op("Mul", n.floats(np.concatenate([ANGLES, ANGLES], -1)), batch)[0]
    return turned(n, x, n.op("Cos", angles)[0], n.op("Sin", angles)[0])


def by_another_input(n: Nodes, x: str, part: str) -> str:
    """Angles that grow with the length of another input, whatever the batch is."""
    length = n.op("Cast", n.op("Gather", n.op("Shape", "past")[0], n.constant(np.array(0)), axis=0)[0], to=1)[0]
    angles = n.op("Mul", n.floats(np.concatenate([ANGLES, ANGLES], -1)), length)[0]
    return turned(n, x, n.op("Cos", angles)[0], n.op("Sin", angles)[0])


Style = Callable[[Nodes, str, str], str]


def rotated_encoder(
    style: Style, batch: int | str, seed: int, read_elsewhere: bool = False, projections: str = "separate"
) -> onnx.ModelProto:
    """An encoder whose Q and K [B, H, S, D] are rotated behind their Transpose."""
    spec = EncoderSpec(LAYERS, WIDTH, WIDTH // DIM, batch, SEQ, projections, seed=seed)
    model = exact(build_encoder(spec, MASK))
    nodes = []
    for node in list(model.graph.node):
        nodes.append(node)
        found = re.search("/([qk])(/y|3)?/bhsd$", node.output[0])
        if node.op_type == "Transpose" and found:
            part, name = found[1], node.output[0]
            node.output[0] = f"{name}/plain"
            node.attribute[0].CopyFrom(helper.make_attribute("perm", [0, 2, 1, 3]))
            made = Nodes(model)
            made.count = 1000 * len(nodes)
            answer = style(made, node.output[0], part)
            nodes += made.nodes
            end = helper.make_node("Transpose", [answer], [name], perm=[0, 1, 3, 2])
            nodes.append(end if part == "k" else helper.make_node("Identity", [answer], [name]))
            if read_elsewhere and part == "k":
                model.graph.output.append(helper.make_tensor_value_info(answer, 1, [batch, WIDTH // DIM, SEQ, DIM]))
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def regions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type == "StofFusedRegion"]


def assert_same(model: onnx.ModelProto, lowered: Lowered, feeds: dict[str, np.ndarray]) -> None:
    expected = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
    got = ReferenceEvaluator(lowered.model, new_ops=[StofAttention, StofFusedRegion]).run(None, feeds)
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=1e-4)


def feeds_of(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.standard_normal((2, SEQ, WIDTH), np.float32)}


def sized(options: LowerOptions, batch: int | str) -> LowerOptions:
    if isinstance(batch, int):
        return options
    sizes = {"x": (2, SEQ, WIDTH)}
    return LowerOptions(options.precision, options.device, sizes, sizes)


@pytest.mark.parametrize("batch", [2, "batch"])
@pytest.mark.parametrize("style", [slices, halves, computed])
def test_no_operator_of_the_rotation_is_left(bench, rng, style, batch):
    model = rotated_encoder(style, batch, int(rng.integers(1 << 30)))
    lowered = bench.lower(bench.optimize(model), sized(HOPPER, batch))
    assert lowered.packed == lowered.fused == len(regions(lowered.model)) == LAYERS
    kinds = Counter(n.op_type for n in lowered.model.graph.node)
    assert not kinds.keys() & {"Slice", "Split", "Neg", "Concat", "Transpose", "Cos", "Sin", "Sub"}
    assert kinds["Reshape"] == 2, "one into rows, one out of them"
    assert_same(model, lowered, feeds_of(rng))


@pytest.mark.parametrize("projections", ["split", "gemm"])
def test_projections_of_rows(bench, rng, projections):
    """One Gemm that is cut into Q, K and V, or one for each."""
    model = rotated_encoder(slices, 2, int(rng.integers(1 << 30)), projections=projections)
    lowered = bench.lower(bench.optimize(model), HOPPER)
    assert lowered.packed == lowered.fused == LAYERS
    assert_same(model, lowered, feeds_of(rng))


def test_a_projection_that_holds_them_in_another_order_is_left_alone(bench, rng):
    model = rotated_encoder(slices, 2, int(rng.integers(1 << 30)), projections="split")
    for node in model.graph.node:
        if node.op_type == "Split" and node.output[0].endswith("/q"):
            node.output[0], node.output[1] = node.output[1], node.output[0]
    lowered = bench.lower(bench.optimize(model), HOPPER)
    assert lowered.packed == lowered.fused == 0
    assert_same(model, lowered, feeds_of(rng))


def test_the_contract_of_its_node(bench, rng):
    lowered = bench.lower(bench.optimize(rotated_encoder(slices, 2, 1)), HOPPER)
    tables = set()
    for node in regions(lowered.model):
        a = attributes_of(node)
        assert (a["template"], a["activation"], a["has_bias"], a["has_residual"]) == ("gemm_epilogue", "none", 1, 0)
        assert (a["rotated_columns"], a["head_dim"], len(node.input)) == (2 * WIDTH, DIM, 4)
        tables.add(node.input[3])
    assert len(tables) == 1, "layers share the table"
    arrays = {i.name: numpy_helper.to_array(i) for i in lowered.model.graph.initializer}
    table = arrays[tables.pop()]
    assert table.dtype == np.float32 and table.shape == (SEQ, DIM)
    np.testing.assert_allclose(table, np.stack([np.cos(ANGLES), np.sin(ANGLES)], -1).reshape(SEQ, DIM), atol=1e-6)


@pytest.mark.parametrize("batch", [2, "batch"])
@pytest.mark.parametrize(
    "style", [neighbours, other_angles_for_k, unequal_halves, one_head_differs, not_linear, with_a_norm, by_the_batch]
)
def test_what_is_not_quite_a_rotation_is_left_alone(bench, rng, style, batch):
    if (style, batch) == (by_the_batch, 2):
        pytest.skip("a fixed batch makes it a rotation")
    model = rotated_encoder(style, batch, int(rng.integers(1 << 30)))
    lowered = bench.lower(bench.optimize(model), sized(HOPPER, batch))
    assert lowered.packed == lowered.fused == 0
    assert sum(1 for n in lowered.model.graph.node if n.op_type == "StofAttention") == LAYERS
    assert_same(model, lowered, feeds_of(rng))


@pytest.mark.parametrize("batch", [2, "batch"])
def test_angles_by_the_length_of_another_input_are_left_alone(bench, rng, batch):
    model = rotated_encoder(by_another_input, batch, int(rng.integers(1 << 30)))
    model.graph.input.append(helper.make_tensor_value_info("past", 1, ["length"]))
    sizes = {"x": (2, SEQ, WIDTH), "past": (7,)}
    lowered = bench.lower(bench.optimize(model), LowerOptions("fp16", HOPPER.device, sizes, sizes))
    assert lowered.packed == lowered.fused == 0
    assert_same(model, lowered, feeds_of(rng) | {"past": np.zeros(7, np.float32)})


def test_keys_that_are_an_output_as_well_are_left_alone(bench, rng):
    model = rotated_encoder(slices, 2, int(rng.integers(1 << 30)), read_elsewhere=True)
    lowered = bench.lower(bench.optimize(model), HOPPER)
    assert lowered.packed == lowered.fused == 0
    assert_same(model, lowered, feeds_of(rng))


@pytest.mark.parametrize(
    "options",
    [LowerOptions(device=Device(80)), LowerOptions("fp32", Device(90)), LowerOptions(device=Device(90), regions=False)],
    ids=["sm80", "fp32", "without regions"],
)
def test_without_a_kernel_for_it_nothing_is_packed(bench, rng, options):
    model = rotated_encoder(slices, 2, int(rng.integers(1 << 30)))
    lowered = bench.lower(bench.optimize(model), options)
    assert (lowered.packed, lowered.fused, lowered.flattened) == (0, 0, 0)
    assert lowered.has_regions == (not options.regions), "an engine with regions is worth a try"
    assert_same(model, lowered, feeds_of(rng))


@pytest.mark.parametrize(
    ("family", "exporter", "dynamic"),
    [
        ("llama", "torchscript", "none"),
        ("llama", "torchscript", "batch"),
        ("mistral", "dynamo", "none"),
        ("modernbert", "torchscript", "batch"),  # one projection that is cut into Q, K and V
        ("modernbert", "dynamo", "none"),
    ],
)
def test_real_exports(bench, rng, tmp_path: Path, family, exporter, dynamic):
    options = ExportOptions(
        family=family, exporter=exporter, opset=17 if exporter == "torchscript" else 18, dynamic=dynamic, layers=LAYERS,
        hidden=64, heads=4, kv_heads=2, seq=48, batch=2, vocab=96, seed=int(rng.integers(1 << 30)),
    )  # fmt: skip
    path = tmp_path / "export.onnx"
    export_model(options, path)
    model = exact(onnx.load(str(path)))
    sizes = {"input_ids": (2, 48)} if dynamic == "batch" else {}
    lowered = bench.lower(bench.optimize(model), LowerOptions(device=Device(90), opt_sizes=sizes, largest_sizes=sizes))
    assert lowered.packed == lowered.fused == LAYERS
    kinds = Counter(n.op_type for n in lowered.model.graph.node)
    assert not kinds.keys() & {"Neg", "Concat", "Transpose", "Cos", "Sin"}
    assert_same(model, lowered, {"input_ids": rng.integers(1, 96, (2, 48))})


def test_partners_of_every_head_stand_side_by_side(rng):
    weights = rng.standard_normal((5, 3 * DIM))
    found = paired(weights, DIM).reshape(5, 3, DIM)
    heads = weights.reshape(5, 3, DIM)
    for j in range(DIM // 2):
        np.testing.assert_array_equal(found[:, :, 2 * j], heads[:, :, j])
        np.testing.assert_array_equal(found[:, :, 2 * j + 1], heads[:, :, j + DIM // 2])
    np.testing.assert_array_equal(paired(weights[0], DIM), paired(weights, DIM)[0])
