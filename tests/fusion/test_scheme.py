"""Schemes, segments, hashes and what may be fused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.fusion.scheme import Scheme
from stof_onnx.fusion.segment import Segment, block_hash
from stof_onnx.fusion.sequence import find_blocks

from tests.fusion.graphs import GraphBuilder, tensors_of


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_segments_to_bits_and_back(lengths: list[int]) -> None:
    ends = np.cumsum(lengths).tolist()
    spans = tuple(zip([0, *ends[:-1]], ends, strict=True))
    scheme = Scheme.encode(spans)
    assert scheme.spans == spans
    assert len(scheme.bits) == ends[-1]
    assert Scheme.parse(scheme.text()) == scheme


@given(st.lists(st.integers(0, 1), min_size=1, max_size=24))
def test_bits_to_segments_and_back(bits: list[int]) -> None:
    scheme = Scheme(tuple(bits))
    assert Scheme.encode(scheme.spans) == scheme
    assert Scheme(tuple(1 - b for b in bits)) == scheme, "the complement means the same segments"
    assert [a[1] for a in scheme.spans[:-1]] == [b[0] for b in scheme.spans[1:]]
    for start, stop in scheme.spans:
        assert len(set(bits[start:stop])) == 1
        assert stop == len(bits) or bits[stop] != bits[start]


@given(st.integers(1, 20), st.data())
def test_regions_keep_their_places(length: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, length), max_size=6)))
    regions = list(zip(cuts[::2], cuts[1::2], strict=False))
    scheme = Scheme.of_regions(regions, length)
    assert set(regions) <= set(scheme.spans)
    assert all(span in regions or span[1] - span[0] == 1 for span in scheme.spans)


@pytest.mark.parametrize("spans", [[(0, 2), (3, 4)], [(0, 2), (1, 3)], [(1, 2)], [(0, 0)]])
def test_spans_with_gaps_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        Scheme.encode(spans)


def test_a_scheme_of_another_block_is_refused() -> None:
    b = GraphBuilder(np.random.default_rng(0))
    model = b.model(b.op("Relu", b.input("x", 2, 8)))
    (block,) = find_blocks(tensors_of(model))
    with pytest.raises(ValueError, match="operators"):
        Scheme((0, 1)).segments(block)
    with pytest.raises(ValueError, match="not a scheme"):
        Scheme.parse("012")


def _random_graph(rng: np.random.Generator, size: int) -> GraphBuilder:
    b = GraphBuilder(rng)
    made = [b.input("x", 4, 8), b.input("y", 4, 8)]
    for _ in range(size):
        kind = rng.choice(["Add", "Mul", "Relu", "Sigmoid", "MatMul"])
        if kind == "MatMul":
            made.append(b.op("MatMul", str(rng.choice(made)), b.weight(8, 8)))
        else:
            made.append(b.op(kind, *map(str, rng.choice(made, 2 if kind in ("Add", "Mul") else 1))))
    return b


@given(st.integers(0, 2**32 - 1), st.integers(2, 10), st.data())
def test_segments_of_random_graphs(seed: int, size: int, data: st.DataObject) -> None:
    """Outputs, inputs and convexity against their definitions, and the hash against names and order of inputs."""
    b = _random_graph(np.random.default_rng(seed), size)
    last = b.nodes[-1].output[0]
    model = b.model(last)
    (block,) = find_blocks(tensors_of(model))
    start = data.draw(st.integers(0, size - 1))
    segment = Segment(block, start, data.draw(st.integers(start + 1, size)))
    inside = [o.node for o in segment.operators]
    outside = [n for n in model.graph.node if not any(n is i for i in inside)]
    made = {o for n in inside for o in n.output}
    read_outside = {i for n in outside for i in n.input} | {last}
    assert set(segment.outputs) == made & read_outside
    weights = {t.name for t in model.graph.initializer}
    assert set(segment.inputs) == {i for n in inside for i in n.input} - made
    assert segment.gemms == len({n.input[0] for n in inside if n.input[-1] in weights})
    assert segment.convex(), "consecutive operators of a topological order always are"
    renamed = type(model).FromString(model.SerializeToString())
    for node in renamed.graph.node:
        node.name = f"other{node.name}"
        for field in (node.input, node.output):
            field[:] = [name if name in ("x", "y") else f"other_{name}" for name in field]
    for value in (*renamed.graph.initializer, *renamed.graph.output):
        value.name = f"other_{value.name}"
    (again,) = find_blocks(tensors_of(renamed))
    assert Segment(again, *segment.span).hash == segment.hash


def test_the_hash_sees_what_matters() -> None:
    def segment_hash(**change: object) -> str:
        b = GraphBuilder(np.random.default_rng(1))
        x, y = b.input("x", 4, change.get("width", 8)), b.input("y", 4, change.get("width", 8))  # type: ignore[arg-type]
        t = b.op(str(change.get("op", "Sub")), *((y, x) if change.get("swap") else (x, y)))
        t = b.op("Mul", t, b.const(change.get("scale", 2.0)))
        out = b.op("LeakyRelu", t, alpha=change.get("alpha", 0.1))
        model = b.model(out, *([t] if change.get("second") else []))
        return block_hash(find_blocks(tensors_of(model))[0])

    changes = [{"width": 16}, {"op": "Add"}, {"scale": 3.0}, {"alpha": 0.2}, {"second": True}]
    hashes = [segment_hash(**c) for c in ({}, *changes)]
    assert segment_hash() == hashes[0]
    assert len(set(hashes)) == len(hashes)
    assert segment_hash(swap=True) == segment_hash(), "x and y are alike: only their order of use counts"


def test_what_can_not_be_fused_says_why() -> None:
    b = GraphBuilder(np.random.default_rng(2))
    x = b.input("x", 4, 8)
    a = b.op("MatMul", x, b.weight(8, 8))
    c = b.op("MatMul", x, b.weight(8, 8))
    d = b.op("MatMul", a, b.weight(8, 8))
    e = b.op("MatMul", d, b.weight(8, 8))
    out = b.op("Add", b.op("Add", c, e), a)
    shape = b.op("Shape", out)
    model = b.model(b.op("Reshape", out, shape))
    (block,) = find_blocks(tensors_of(model))
    assert "3 GEMMs" in Segment(block, 0, 4).problem()
    assert Segment(block, 0, 3).problem() == "", "two that share an input count as one"
    kinds = [o.op for o in block.operators]
    at = kinds.index("Shape")
    assert "something else than fp16" in Segment(block, at, at + 1).problem()


def test_attentions_part_the_graph() -> None:
    b = GraphBuilder(np.random.default_rng(3))
    first = b.op("Relu", b.input("x", 4, 8))
    between = b.op("StofAttention_fake", first, first, first)
    b.nodes[-1].domain = "stof"
    out = b.op("Add", first, between)
    blocks = find_blocks(tensors_of(b.model(out)))
    assert [[o.op for o in block.operators] for block in blocks] == [["Relu"], ["Add"]], "the attention parts them"
