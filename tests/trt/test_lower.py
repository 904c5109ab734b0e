"""Lowered models compute what the originals do, with the intended nodes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from stof_onnx.graph.proto_graph import attributes_of
from stof_onnx.kernels.select import Device
from stof_onnx.trt.lower import LowerOptions

from benchmarks.encoder import EncoderSpec, build_encoder

SEQ = 200


def window_and_global(seq: int) -> np.ndarray:
    q, k = np.arange(seq)[:, None], np.arange(seq)[None]
    return (np.abs(q - k) <= 20) | (k < 3) | (q == 70)


def plugins(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type == "StofAttention"]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("projections", ["separate", "gemm", "split"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_encoder_becomes_packed_rows(bench, rng, arch, projections, pre_norm):
    spec = EncoderSpec(
        2, 64, 4, 2, SEQ, projections, pre_norm, decomposed_norm=arch == 80, seed=int(rng.integers(1 << 30))
    )
    model = build_encoder(spec, window_and_global(SEQ))
    device = Device(arch, kernels=(f"block_sm{arch}",))
    lowered = bench.lower(bench.optimize(model), LowerOptions(device=device))
    assert [s.kernel for s in lowered.sites] == [f"block_sm{arch}"] * 2
    assert all(s.predicted_us > 0 and s.profile for s in lowered.sites)
    assert lowered.packed == 2
    kinds = Counter(n.op_type for n in lowered.model.graph.node)
    assert kinds["Reshape"] == 2, "one into rows, one out of them"
    assert kinds["Transpose"] == kinds["Softmax"] == kinds["Split"] == 0
    gemms = 1 + 1 + 2  # packed projection, output projection, feed-forward
    assert kinds["MatMul"] + kinds["Gemm"] == 2 * gemms
    assert not lowered.model.functions
    feeds = {"x": rng.standard_normal((2, SEQ, 64), np.float32)}
    bench.assert_equal(model, lowered.model, feeds)


def test_arrays_are_stored_once(bench):
    model = build_encoder(EncoderSpec(3, 64, 4, 1, SEQ), window_and_global(SEQ))
    lowered = bench.lower(bench.optimize(model))
    inputs = [tuple(n.input[1:8]) for n in plugins(lowered.model)]
    assert len(inputs) == 3
    assert len(set(inputs)) == 1
    stored = {i.name for i in lowered.model.graph.initializer}
    assert not any(n.startswith("stof/") and "lowered" not in n for n in stored if "row_ptr" in n or "col_idx" in n)


@pytest.mark.parametrize("axes", [("batch", SEQ), ("batch", "seq"), (2, "seq")])
def test_dynamic_axes(bench, rng, axes):
    batch, seq = axes
    spec = EncoderSpec(2, 64, 4, batch, seq, seed=int(rng.integers(1 << 30)))
    q, k = np.arange(SEQ)[:, None], np.arange(SEQ)[None]
    model = build_encoder(spec, (k <= q) & (q - k < 50))
    low, high = (2 if isinstance(batch, int) else 1), (2 if isinstance(batch, int) else 4)
    shortest = SEQ if isinstance(seq, int) else 16
    path = bench.optimize(model, "--shape", f"x:{low}x{shortest}x64:{high}x{SEQ}x64")
    sizes = {"x": (high, SEQ, 64)}
    lowered = bench.lower(path, LowerOptions(opt_sizes=sizes, largest_sizes=sizes))
    assert lowered.packed == 2
    assert all(("seq" in attributes_of(n)) == isinstance(seq, int) for n in plugins(lowered.model))
    reshapes = [n for n in lowered.model.graph.node if n.op_type == "Reshape"]
    assert len(reshapes) == 2
    for b, s in {(low, shortest), (high, SEQ), (high, SEQ if isinstance(seq, int) else 77)}:
        feeds = {"x": rng.standard_normal((b, s, 64), np.float32)}
        bench.assert_equal(model, lowered.model, feeds)


def test_rank_is_kept_where_rows_can_not_be_proven(bench, rng):
    """A position table [1, S, C] is added between two layers: that Add keeps its rank, the rest becomes rows."""
    model = build_encoder(EncoderSpec(2, 64, 4, 2, SEQ, seed=5), window_and_global(SEQ))
    table = onnx.numpy_helper.from_array(rng.standard_normal((1, SEQ, 64), np.float32), "table")
    model.graph.initializer.append(table)
    place = next(i for i, n in enumerate(model.graph.node) if n.output[0] == "layer1/q/product")
    for node in model.graph.node[place:]:
        for i, name in enumerate(node.input):
            if name == "layer0/ln2":
                node.input[i] = "shifted"
    model.graph.node.insert(place, onnx.helper.make_node("Add", ["layer0/ln2", "table"], ["shifted"], "shift"))
    lowered = bench.lower(bench.optimize(model))
    add = next(n for n in lowered.model.graph.node if n.name == "shift")
    assert "table" in add.input
    assert sum(n.op_type == "Reshape" for n in lowered.model.graph.node) == 4
    bench.assert_equal(model, lowered.model, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})


def test_output_inside_the_rows_keeps_its_name_and_rank(bench, rng):
    model = build_encoder(EncoderSpec(2, 64, 4, 2, SEQ, seed=6), window_and_global(SEQ))
    model.graph.output.append(onnx.helper.make_tensor_value_info("layer0/ln2", 1, [2, SEQ, 64]))
    lowered = bench.lower(bench.optimize(model))
    bench.assert_equal(model, lowered.model, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})


@pytest.mark.parametrize("batch, seq", [("batch", SEQ), (2, "seq"), ("batch", "seq")])
def test_an_output_that_is_declared_static_all_the_same(bench, rng, batch, seq):
    """Its input was made dynamic by hand, as ONNX Runtime lets one do."""
    mask = np.tril(np.ones((SEQ, SEQ), bool))
    model = build_encoder(EncoderSpec(2, 64, 4, batch, seq, seed=6), mask)
    for axis, size in zip(model.graph.output[0].type.tensor_type.shape.dim, (2, SEQ, 64), strict=True):
        axis.dim_value = size
    low = [2 if isinstance(batch, int) else 1, SEQ if isinstance(seq, int) else 8]
    path = bench.optimize(model, "--shape", f"x:{low[0]}x{low[1]}x64:2x{SEQ}x64", "--no-verify")
    sizes = {"x": (2, SEQ, 64)}
    lowered = bench.lower(path, LowerOptions(opt_sizes=sizes, largest_sizes=sizes))
    assert lowered.packed == 2
    for shape in {(2, SEQ), (low[0], low[1]), (2, max(low[1], SEQ // 2))}:
        bench.assert_equal(model, lowered.model, {"x": rng.standard_normal((*shape, 64), np.float32)})


def test_weights_that_a_caller_may_override_stay_inputs(bench, rng):
    model = build_encoder(EncoderSpec(2, 64, 4, 2, SEQ, seed=6), window_and_global(SEQ))
    names = ("layer0/q/w", "layer1/fc1/b")
    stored = {t.name: t for t in model.graph.initializer}
    for name in names:
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, 1, list(stored[name].dims)))
    lowered = bench.lower(bench.optimize(model))
    assert lowered.packed == 1 and set(names) <= {t.name for t in lowered.model.graph.initializer}
    feeds = {"x": rng.standard_normal((2, SEQ, 64), np.float32)}
    bench.assert_equal(model, lowered.model, feeds)
    given = {name: rng.standard_normal(list(stored[name].dims), np.float32) for name in names}
    bench.assert_equal(model, lowered.model, feeds | given)


def test_without_rank_2_nothing_but_the_nodes_changes(bench, rng):
    model = build_encoder(EncoderSpec(1, 64, 4, 2, SEQ, seed=7), window_and_global(SEQ))
    lowered = bench.lower(bench.optimize(model), LowerOptions(rank_2=False))
    assert (lowered.packed, lowered.flattened) == (0, 0)
    bench.assert_equal(model, lowered.model, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})


def test_head_size_without_kernel_stays_operators(bench, rng):
    model = build_encoder(EncoderSpec(1, 48, 4, 2, 64, seed=8), window_and_global(64)[:64, :64])
    lowered = bench.lower(bench.optimize(model))
    assert [s.kernel for s in lowered.sites] == [""]
    assert "head size 12" in lowered.sites[0].reason
    assert not plugins(lowered.model)
    assert not lowered.model.functions
    bench.assert_equal(model, lowered.model, {"x": rng.standard_normal((2, 64, 48), np.float32)})


def with_positions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Q and K times a table of positions, between projection and scores, as rotary embeddings are: nothing to pack."""
    rng = np.random.default_rng(0)
    seq, dim = SEQ, 16
    table = 1 + 0.3 * rng.standard_normal((seq, dim), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "positions"))
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type == "Transpose" and node.output[0].endswith(("q/y/bhsd", "k/y/bhsd")):
            name, is_q = node.output[0], node.output[0].endswith("q/y/bhsd")
            node.output[0], scaled = f"{name}/plain", name if is_q else f"{name}/scaled"
            node.attribute[0].CopyFrom(onnx.helper.make_attribute("perm", [0, 2, 1, 3]))
            nodes.append(onnx.helper.make_node("Mul", [f"{name}/plain", "positions"], [scaled]))
            if not is_q:
                nodes.append(onnx.helper.make_node("Transpose", [scaled], [name], perm=[0, 1, 3, 2]))
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


@pytest.mark.parametrize("batch", [2, "batch"])
def test_attentions_that_can_not_be_packed_leave_the_ranks(bench, rng, batch):
    model = with_positions(build_encoder(EncoderSpec(2, 64, 4, batch, SEQ, seed=9), window_and_global(SEQ)))
    options = LowerOptions(opt_sizes={"x": (2, SEQ, 64)}, largest_sizes={"x": (2, SEQ, 64)})
    lowered = bench.lower(bench.optimize(model), options)
    assert (lowered.packed, lowered.flattened, len(plugins(lowered.model))) == (0, 0, 2)
    feeds = {"x": rng.standard_normal((2, SEQ, 64), np.float32)}
    bench.assert_equal(model, lowered.model, feeds)
