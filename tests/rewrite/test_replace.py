"""What a replacement adds, shares and removes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.attention.functions import ATTRIBUTES
from stof_onnx.attention.rewrite import replace_attention
from stof_onnx.attention.types import AttentionMatch, BiasKind, KvKind, Layout, MaskedRow
from stof_onnx.errors import StofError
from stof_onnx.graph.model import LoadedModel, load_model
from stof_onnx.graph.save import save_model
from stof_onnx.mask import ONNX_INPUTS, encode

from tests.rewrite.sites import Case, build, nodes_of

CAUSAL = np.tril(np.ones((20, 20), bool))[None, None]
WINDOW = (abs(np.arange(20)[:, None] - np.arange(20)) < 4)[None, None]


def optimized(cases: list[Case], tmp_path: Path, name: str = "out.onnx") -> onnx.ModelProto:
    model, matches = build(cases, tmp_path / "in.onnx")
    replace_attention(model, matches)
    save_model(model, tmp_path / name)
    return onnx.load(tmp_path / name)


def test_equal_masks_are_stored_and_decoded_once(tmp_path: Path) -> None:
    proto = optimized([Case(allowed=CAUSAL), Case(allowed=CAUSAL, v_dim=16), Case(allowed=WINDOW)], tmp_path)
    assert Counter(n.op_type for n in proto.graph.node)["StofMask_20x20_tiles16x16"] == 2
    sites = nodes_of(proto, "StofAttention")
    assert sites[0].input[3:] == sites[1].input[3:] and sites[0].input[3:] != sites[2].input[3:]
    bitmaps = {s.input[3 + ONNX_INPUTS.index("bitmap")] for s in sites}
    stored = [t.name for t in proto.graph.initializer]
    assert len(bitmaps) == 2 and len(stored) == len(set(stored)) and bitmaps <= set(stored)


def test_masks_with_different_run_time_padding_are_not_shared(tmp_path: Path) -> None:
    case = Case(allowed=CAUSAL, kv_kind=KvKind.MASK)
    proto = optimized([case, case], tmp_path)
    sites = nodes_of(proto, "StofAttention")
    assert sites[0].input[10] != sites[1].input[10] and sites[0].input[11] != sites[1].input[11]
    assert sites[0].input[3:10] == sites[1].input[3:10]


def test_node_carries_the_contract(tmp_path: Path) -> None:
    layouts = ("BHSD", "BHSD", "BSHD", "BHSD")
    case = Case(allowed=WINDOW, layouts=layouts, heads=6, softcap=3.0, masked_row=MaskedRow.NAN)
    (node,) = nodes_of(optimized([case], tmp_path), "StofAttention")
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert tuple(attributes) == ATTRIBUTES
    assert node.domain == "stof" and list(node.output) == ["core0"] and len(node.input) == 11
    assert {k: attributes[k] for k in ("num_heads", "num_kv_heads", "tile_m", "mask_seq_q", "mask_seq_kv")} == {
        "num_heads": 6,
        "num_kv_heads": 3,
        "tile_m": 16,
        "mask_seq_q": 20,
        "mask_seq_kv": 20,
    }
    assert attributes["layout"] == b"BHSD,BHSD,BSHD,BHSD" and attributes["masked_row"] == b"nan"
    assert attributes["softcap"] == 3.0 and attributes["scale"] == case.scale


def test_no_mask_input_where_nothing_is_masked(tmp_path: Path) -> None:
    proto = optimized([Case(), Case(bias_kind=BiasKind.DENSE, bias=np.zeros((1, 1, 20, 20), np.float32))], tmp_path)
    assert not nodes_of(proto, "StofMask")
    assert [len(n.input) for n in nodes_of(proto, "StofAttention")] == [10, 11]
    arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    row_ptr = arrays[nodes_of(proto, "StofAttention")[0].input[3]]
    assert row_ptr.tolist() == [[0, 1]]  # one full tile


def test_onnx_runtime_decodes_static_masks_when_it_loads_the_file(tmp_path: Path) -> None:
    optimized([Case(allowed=CAUSAL), Case(allowed=WINDOW, softcap=2.0)], tmp_path)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    ort.InferenceSession(tmp_path / "out.onnx", options)
    ops = Counter(n.op_type for n in onnx.load(tmp_path / "loaded.onnx").graph.node)
    assert ops["Add"] == ops["Softmax"] == 2
    assert not {"ScatterElements", "Gather", "BitShift", "Where", "Cast"} & set(ops)


def test_two_runs_give_equal_bytes_and_the_second_pass_changes_nothing(tmp_path: Path) -> None:
    cases = [Case(allowed=CAUSAL, kv_kind=KvKind.MASK), Case(allowed=WINDOW), Case(allowed=CAUSAL)]
    optimized(cases, tmp_path, "a.onnx")
    optimized(cases, tmp_path, "b.onnx")
    first = (tmp_path / "a.onnx").read_bytes()
    assert first == (tmp_path / "b.onnx").read_bytes()
    again = load_model(tmp_path / "a.onnx")
    assert replace_attention(again, []) == []
    save_model(again, tmp_path / "c.onnx")
    assert first == (tmp_path / "c.onnx").read_bytes()


def test_sites_added_by_a_later_run_reuse_masks_and_functions(tmp_path: Path) -> None:
    model, matches = build([Case(allowed=CAUSAL), Case(allowed=CAUSAL)], tmp_path / "in.onnx")
    replace_attention(model, matches[:1])
    save_model(model, tmp_path / "half.onnx")
    half = load_model(tmp_path / "half.onnx")
    tensors = half.graph.tensors()
    names = {f: tensors[getattr(matches[1], f).name] for f in ("q", "k", "v", "output")}
    replace_attention(half, [replace(matches[1], graph=half.graph, nodes=(), **names)])
    save_model(half, tmp_path / "whole.onnx")
    sites = nodes_of(onnx.load(tmp_path / "whole.onnx"), "StofAttention")
    assert len(sites) == 2 and sites[0].input[3:10] == sites[1].input[3:10]
    assert sites[0].op_type == sites[1].op_type


def test_results_follow_the_order_of_the_matches(tmp_path: Path) -> None:
    model, matches = build([Case(), Case(softcap=1.0)], tmp_path / "in.onnx")
    sites = replace_attention(model, matches[::-1])
    assert [s.match.name for s in sites] == ["site1", "site0"]
    assert [s.removed for s in sites] == [("site1",), ("site0",)]
    assert [n.name for n in model.graph.nodes if n.domain == "stof"] == ["site0/StofAttention", "site1/StofAttention"]


def test_a_function_of_that_name_with_another_body_is_an_error(tmp_path: Path) -> None:
    model, matches = build([Case()], tmp_path / "in.onnx")
    identity = helper.make_node("Identity", ["Q"], ["O"])
    imports = [helper.make_opsetid("", 17)]
    model.proto.functions.append(
        helper.make_function("stof", "StofAttention_bhsd_f32", ["Q"], ["O"], [identity], imports)
    )
    with pytest.raises(StofError, match="another function"):
        replace_attention(model, matches)


def plain_attention(prefix: str, mask: str) -> list[onnx.NodeProto]:
    """softmax(q k^T + mask) v on {prefix}q, k, v with a dead node beside it."""
    p = prefix
    return [
        helper.make_node("Transpose", [f"{p}k"], [f"{p}kt"], f"{p}transpose", perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", [f"{p}q", f"{p}kt"], [f"{p}s"], f"{p}scores"),
        helper.make_node("Add", [f"{p}s", mask], [f"{p}sm"], f"{p}add"),
        helper.make_node("Softmax", [f"{p}sm"], [f"{p}p"], f"{p}softmax", axis=-1),
        helper.make_node("MatMul", [f"{p}p", f"{p}v"], [f"{p}o"], f"{p}values"),
        helper.make_node("Neg", [f"{p}q"], [f"{p}unused"], f"{p}dead_before"),
    ]


def match_in(graph: gs.Graph, prefix: str, name: str) -> AttentionMatch:
    match = match_of(graph, [f"{prefix}{w}" for w in "qkvo"], name)
    return replace(match, nodes=tuple(n for n in graph.nodes if n.name == f"{prefix}softmax"))


def match_of(graph: gs.Graph, names: list[str], name: str) -> AttentionMatch:
    tensors = {t.name: t for t in [*graph.tensors().values(), *graph.inputs]}
    q, k, v, output = (tensors[n] for n in names)
    return AttentionMatch(
        name=name,
        graph=graph,
        q=q,
        k=k,
        v=v,
        output=output,
        q_layout=Layout.BHSD,
        k_layout=Layout.BHSD,
        v_layout=Layout.BHSD,
        o_layout=Layout.BHSD,
        num_heads=3,
        num_kv_heads=3,
        head_dim=8,
        v_head_dim=8,
        seq_q=20,
        seq_kv=20,
        dynamic_seq=False,
        dtype=np.dtype(np.float32),
        scale=1.0,
        mask=encode(CAUSAL, 16, 16),
    )


def additive_mask() -> onnx.TensorProto:
    return numpy_helper.from_array(np.where(CAUSAL, 0, -np.inf).astype(np.float32), "mask")


def value_info(*names: str) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3, 20, 8]) for n in names]


def compare(before: onnx.ModelProto, model: LoadedModel, tmp_path: Path, extra: dict[str, np.ndarray]) -> None:
    save_model(model, tmp_path / "out.onnx")
    after = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(after, full_check=True)
    rng = np.random.default_rng()
    given = {n: rng.standard_normal((2, 3, 20, 8)).astype(np.float32) for n in "qkv"} | extra
    results = [ort.InferenceSession(m.SerializeToString()).run(None, given) for m in (before, after)]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)


def loaded(proto: onnx.ModelProto, tmp_path: Path) -> LoadedModel:
    onnx.save(proto, tmp_path / "in.onnx")
    return load_model(tmp_path / "in.onnx")


def test_only_nodes_that_lost_their_readers_go(tmp_path: Path) -> None:
    nodes = plain_attention("", "mask")
    nodes.insert(3, helper.make_node("Abs", ["kt"], ["kept"], "reads_transpose"))
    graph = helper.make_graph(nodes, "g", value_info(*"qkv"), [*value_info("o"), value_info("kept")[0]])
    graph.output[1].type.tensor_type.shape.dim[2].dim_value = 8
    graph.output[1].type.tensor_type.shape.dim[3].dim_value = 20
    graph.initializer.append(additive_mask())
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=7)
    model = loaded(proto, tmp_path)
    (site,) = replace_attention(model, [match_in(model.graph, "", "core")])
    assert sorted(site.removed) == ["add", "scores", "softmax", "values"]
    left = [n.name for n in model.graph.nodes if n.domain != "stof"]
    assert left == ["transpose", "reads_transpose", "dead_before"]
    compare(proto, model, tmp_path, {})
    after = onnx.load(tmp_path / "out.onnx")
    assert after.ir_version == 8 and any("IR version raised" in note for note in model.notes)
    assert "mask" not in {t.name for t in after.graph.initializer}


def test_sites_in_branches_and_loops_share_one_decoded_mask(tmp_path: Path) -> None:
    then = helper.make_graph(plain_attention("", "mask"), "then", [], value_info("o"))
    other_nodes = [
        helper.make_node("Mul", ["q", "two"], ["e.q"]),
        helper.make_node("Identity", ["k"], ["e.k"]),
        helper.make_node("Identity", ["v"], ["e.v"]),
        *plain_attention("e.", "mask"),
    ]
    other = helper.make_graph(other_nodes, "else", [], value_info("e.o"))
    body_nodes = [
        helper.make_node("Identity", ["keep"], ["keep_out"]),
        helper.make_node("Identity", ["state"], ["b.q"]),
        helper.make_node("Identity", ["k"], ["b.k"]),
        helper.make_node("Identity", ["v"], ["b.v"]),
        *plain_attention("b.", "mask"),
    ]
    body = helper.make_graph(
        body_nodes,
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("keep", TensorProto.BOOL, []),
            *value_info("state"),
        ],
        [helper.make_tensor_value_info("keep_out", TensorProto.BOOL, []), *value_info("b.o")],
    )
    nodes = [
        helper.make_node("If", ["cond"], ["branch"], then_branch=then, else_branch=other),
        helper.make_node("Loop", ["trips", "", "branch"], ["result"], body=body),
    ]
    inputs = [*value_info(*"qkv"), helper.make_tensor_value_info("cond", TensorProto.BOOL, [])]
    graph = helper.make_graph(nodes, "g", inputs, value_info("result"))
    graph.initializer.append(additive_mask())
    graph.initializer.append(numpy_helper.from_array(np.float32(2), "two"))
    graph.initializer.append(numpy_helper.from_array(np.int64(3), "trips"))
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = loaded(proto, tmp_path)
    branch, loop = model.graph.nodes
    sites = [(branch.attrs["then_branch"], ""), (branch.attrs["else_branch"], "e."), (loop.attrs["body"], "b.")]
    replaced = replace_attention(model, [match_in(g, p, f"site{p}") for g, p in sites])
    assert all("softmax" in " ".join(s.removed) for s in replaced)
    assert [n.op for n in model.graph.nodes] == ["StofMask_20x20_tiles16x16", "If", "Loop"]
    for condition in (True, False):
        compare(proto, model, tmp_path, {"cond": np.array(condition)})
    after = onnx.load(tmp_path / "out.onnx")
    inner = [a.g for n in after.graph.node for a in n.attribute if a.HasField("g")]
    assert not any(g.initializer for g in inner), "mask arrays belong to the main graph"


def test_site_in_a_local_function(tmp_path: Path) -> None:
    constant = helper.make_node("Constant", [], ["mask"], value=additive_mask())
    imports = [helper.make_opsetid("", 17)]
    nodes = [constant, *plain_attention("", "mask")]
    function = helper.make_function("custom", "Block", ["q", "k", "v"], ["o"], nodes, imports)
    calls = [
        helper.make_node("Block", ["q", "k", "v"], ["o1"], "first", domain="custom"),
        helper.make_node("Block", ["o1", "k", "v"], ["o2"], "second", domain="custom"),
    ]
    graph = helper.make_graph(calls, "g", value_info(*"qkv"), value_info("o2"))
    proto = helper.make_model(
        graph, functions=[function], opset_imports=[*imports, helper.make_opsetid("custom", 1)], ir_version=8
    )
    model = loaded(proto, tmp_path)
    (block,) = model.graph.functions
    match = match_in(block, "", "Block/core")
    match.q.shape = match.k.shape = match.v.shape = None
    replace_attention(model, [match])
    compare(proto, model, tmp_path, {})
    after = onnx.load(tmp_path / "out.onnx")
    assert [n.op_type for n in after.graph.node] == ["Block", "Block"]
    assert {"StofMask_20x20_tiles16x16", "StofAttention_bhsd_f32_mask"} <= {f.name for f in after.functions}
    (written,) = (f for f in after.functions if f.name == "Block")
    assert {o.domain for o in written.opset_import} == {"", "stof"}


def test_dynamic_sites_of_one_axis_name_share_the_run_time_mask(tmp_path: Path) -> None:
    case = Case(allowed=CAUSAL, dynamic=True)
    model, matches = build([case, case], tmp_path / "in.onnx")
    replace_attention(model, matches)
    assert [n.op for n in model.graph.nodes if "StofMask" in n.op] == [
        "StofMask_upto20x20_tiles16x16_zerorows_qbhsd_kbhsd"
    ]


def test_sequence_axes_are_known_to_be_equal_by_shape_inference(tmp_path: Path) -> None:
    """Exports without shapes of inner tensors: Q and K of both sites have the sequence of one input."""
    hidden = ["batch", "seq", 24]
    nodes = []
    for i, source in enumerate(("x", "o0")):
        for which in "qkv":
            nodes.append(helper.make_node("MatMul", [source, "w"], [f"{which}{i}"]))
        nodes.append(helper.make_node("Placeholder", [f"{w}{i}" for w in "qkv"], [f"core{i}"], domain="test"))
        nodes.append(helper.make_node("Add", [f"core{i}", source], [f"o{i}"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, hidden)],
        [helper.make_tensor_value_info("o1", TensorProto.FLOAT, hidden)],
        [numpy_helper.from_array(np.eye(24, dtype=np.float32).repeat(2, 1)[:, :24], "w")],
        value_info=[helper.make_tensor_value_info(f"core{i}", TensorProto.FLOAT, hidden) for i in range(2)],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("test", 1)]
    model = loaded(helper.make_model(graph, opset_imports=imports, ir_version=8), tmp_path)
    tensors = model.graph.tensors()
    base = replace(match_of(model.graph, ["q0", "k0", "v0", "core0"], "site0"), dynamic_seq=True, ranks=(3, 3, 3))
    layouts = {f"{x}_layout": Layout.BSHD for x in "qkvo"}
    ends = [dict(zip(("q", "k", "v"), (tensors[f"{w}{i}"] for w in "qkv"), strict=True)) for i in range(2)]
    matches = [replace(base, **layouts, **ends[i], output=tensors[f"core{i}"], name=f"site{i}") for i in range(2)]
    assert all(m.q.shape is None for m in matches)
    replace_attention(model, matches)
    assert [n.op.split("_")[0] for n in model.graph.nodes if n.domain == "stof"] == [
        "StofMask",
        "StofAttention",
        "StofAttention",
    ]
    save_model(model, tmp_path / "out.onnx")
    x = np.random.default_rng().standard_normal((2, 13, 24)).astype(np.float32)
    (result,) = ort.InferenceSession(tmp_path / "out.onnx").run(None, {"x": x})
    assert result.shape == x.shape and np.isfinite(result).all()


def test_a_layout_no_tensor_can_have_is_reported(tmp_path: Path) -> None:
    model, matches = build([Case(layouts=("BSHD",) * 4, rank=3)], tmp_path / "in.onnx")
    with pytest.raises(StofError, match="rank 3"):
        replace_attention(model, [replace(matches[0], q_layout=Layout.BHSD)])
