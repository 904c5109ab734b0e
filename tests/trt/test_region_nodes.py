"""Fused regions: the portable file computes what the original does, and so do plugin nodes, by their contract."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from stof_onnx import cli
from stof_onnx.errors import StofError
from stof_onnx.fusion.functions import NORM_ATTRIBUTES
from stof_onnx.fusion.search import Measurement
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.graph.proto_graph import attributes_of
from stof_onnx.kernels import gemm, gemm_pair
from stof_onnx.kernels.gemm_pair import GemmPair
from stof_onnx.kernels.select import Device
from stof_onnx.trt import region_nodes
from stof_onnx.trt.lower import Lowered, LowerOptions, lower_file

from benchmarks.encoder import EncoderSpec, build_encoder
from tests.trt.plugin_reference import StofAttention
from tests.trt.region_reference import StofFusedRegion, as_text

SEQ = 40
MASK = np.abs(np.arange(SEQ)[:, None] - np.arange(SEQ)[None]) <= 5


@pytest.fixture(autouse=True)
def fuse_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever TensorRT keeps is slow, and programs are "compiled" to the text of what they compute."""
    monkeypatch.setattr(Roofline, "left", lambda self, piece: Measurement(1e4 * len(piece)))
    monkeypatch.setattr(region_nodes, "_compile", as_text)
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))


def exact(model: onnx.ModelProto, smallest: int = 1) -> onnx.ModelProto:
    """The model with weights that fp16 holds exactly, so that engines in fp16 have the same ones.

    Args:
        smallest: elements of a tensor that counts as a weight: rounded numbers of a GELU make it a chain of operators.
    """
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if tensor.data_type == onnx.TensorProto.FLOAT and value.ndim in (1, 2) and value.size >= smallest:
            tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float16).astype(np.float32), tensor.name))
    return model


def optimize(folder: Path, model: onnx.ModelProto, *options: str) -> Path:
    source, target = folder / "model.onnx", folder / "model.stof.onnx"
    onnx.save(model, str(source))
    arguments = ["optimize", str(source), "-o", str(target), "--no-engine", "--report", str(folder / "report.json")]
    assert cli.main([*arguments, *options]) == 0
    return target


def check(model: onnx.ModelProto, lowered: Lowered, feeds: dict[str, np.ndarray]) -> None:
    expected = ReferenceEvaluator(model).run(None, feeds)
    got = ReferenceEvaluator(lowered.model, new_ops=[StofAttention, StofFusedRegion]).run(None, feeds)
    for a, b in zip(expected, got, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=1e-4)


def regions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type == "StofFusedRegion"]


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("projections", ["separate", "split"])
def test_every_operator_between_attentions_is_fused(tmp_path, rng, pre_norm, decomposed, projections):
    spec = EncoderSpec(3, 64, 4, 2, SEQ, projections, pre_norm, decomposed, seed=int(rng.integers(1 << 30)))
    model = exact(build_encoder(spec, MASK))
    path = optimize(tmp_path, model, "--tune-budget", "60s")
    portable = onnx.load(str(path))
    functions = [f for f in portable.functions if f.name.startswith("StofFusedRegion_")]
    calls = Counter(n.op_type for n in portable.graph.node if n.op_type.startswith("StofFusedRegion_"))
    assert {f.name for f in functions} == set(calls), "one function for each distinct region"
    assert max(calls.values()) >= 2, "equal layers share them"
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["fusion"]
    assert len(report["regions"]) == sum(calls.values())
    lowered = lower_file(path, LowerOptions(device=Device(90)))
    nodes = regions(lowered.model)
    assert len(nodes) == lowered.fused == sum(calls.values())
    kinds = Counter(n.op_type for n in lowered.model.graph.node)
    assert kinds["Erf"] == kinds["LayerNormalization"] == kinds["Sqrt"] == 0
    gemms = [n for n in nodes if attributes_of(n)["template"] in ("gemm_epilogue", "gemm_norm")]
    assert len(gemms) == 12 and not lowered.model.functions
    assert kinds["MatMul"] + kinds["Gemm"] == 0, "the packed projections are regions, too"
    assert lowered.packed == 3
    assert kinds["Reshape"] == 2, "one into rows, one out of them: regions are on 2-D tensors"
    types = {i.name: i.data_type for i in lowered.model.graph.initializer}
    weights = {name for n in nodes for name in n.input if name in types}
    assert {types[name] for name in weights} == {onnx.TensorProto.FLOAT16}
    check(model, lowered, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})


def test_the_contract_of_gemm_nodes(tmp_path, rng):
    model = exact(build_encoder(EncoderSpec(2, 64, 4, 2, SEQ), MASK))
    lowered = lower_file(optimize(tmp_path, model, "--tune-budget", "60s"), LowerOptions(device=Device(90)))
    for node in regions(lowered.model):
        a = attributes_of(node)
        common = {"template", "plugin_version", "plugin_namespace"}
        wanted = {
            "gemm_epilogue": {"activation", "config", "has_bias", "has_residual"},
            "cubin": {"program"},
        }
        assert set(a) == common | wanted[str(a["template"])]
        assert (a["plugin_version"], a["plugin_namespace"], node.domain) == ("1", "stof", "stof")
        if a["template"] == "gemm_epilogue":
            assert len(node.input) == 2 + a["has_bias"] + a["has_residual"]
    residuals = Counter(attributes_of(n).get("has_residual") for n in regions(lowered.model))
    assert residuals[1] == 4


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
def test_norms_behind_their_gemms(tmp_path, rng, monkeypatch, pre_norm, decomposed):
    """Where that is fastest: one node computes product and norm, and in pre-norm models keeps the sum."""
    estimate = gemm.estimate_us

    def eager(template, *sizes, **options):
        return 1.0 if template == "gemm_norm" else estimate(template, *sizes, **options)

    monkeypatch.setattr(gemm, "estimate_us", eager)
    spec = EncoderSpec(3, 64, 4, 2, SEQ, "separate", pre_norm, decomposed, seed=int(rng.integers(1 << 30)))
    model = exact(build_encoder(spec, MASK))
    lowered = lower_file(optimize(tmp_path, model, "--tune-budget", "60s"), LowerOptions(device=Device(90)))
    found = [n for n in regions(lowered.model) if attributes_of(n)["template"] == "gemm_norm"]
    kept = Counter()
    for node in found:
        a = attributes_of(node)
        assert set(a) == {"template", "plugin_version", "plugin_namespace", "config", *NORM_ATTRIBUTES}
        assert len(node.input) == 2 + sum(int(a[name]) for name in NORM_ATTRIBUTES if name.startswith("has_"))
        assert len(node.output) == 1 + a["keep_sum"]
        kept[a["keep_sum"]] += 1
    assert sum(kept.values()) >= 5 and bool(kept[1]) == pre_norm
    check(model, lowered, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})


@pytest.mark.parametrize("decomposed", [False, True])
def test_two_gemms_in_one_node(tmp_path, rng, monkeypatch, decomposed):
    """Where that is fastest, and what lies between them is narrow: one node computes an FFN of 128 columns."""
    monkeypatch.setattr(gemm_pair, "estimate_us", lambda *_: 1.0)
    spec = EncoderSpec(3, 32, 2, "batch", "seq", "separate", False, decomposed, seed=int(rng.integers(1 << 30)))
    model = exact(build_encoder(spec, MASK), smallest=2)
    path = optimize(tmp_path, model, "--tune-budget", "60s", "--shape", f"x:1x8x32:2x{SEQ}x32")
    functions = onnx.load(str(path)).functions
    assert sum("inner_bias" in f.attribute for f in functions) == 1, "equal layers share one"
    sizes = {"x": (2, SEQ, 32)}
    lowered = lower_file(path, LowerOptions(device=Device(80), opt_sizes=sizes, largest_sizes=sizes))
    programs = [a["program"] for n in regions(lowered.model) if (a := attributes_of(n))["template"] == "cubin"]
    pairs = [held for held in map(json.loads, programs) if held["pair"]]
    assert len(pairs) == 3 and {held["rank"] for held in pairs} == {2}
    wanted = GemmPair(32, 128, 32, "fp16", "gelu_erf", "none", True, True, True)
    assert {GemmPair.from_json(held["program"]) for held in pairs} == {wanted}
    for batch, seq in ((2, SEQ), (1, 8)):
        check(model, lowered, {"x": rng.standard_normal((batch, seq, 32), np.float32)})


def test_without_regions_the_engine_gets_the_operators(tmp_path, rng):
    """The attention-only engine of the same file: nothing of the regions is left in it."""
    model = build_encoder(EncoderSpec(2, 64, 4, 2, SEQ, pre_norm=True), MASK)
    path = optimize(tmp_path, model, "--tune-budget", "60s")
    plain = optimize(tmp_path, model)
    lowered = lower_file(path, LowerOptions(regions=False))
    assert not regions(lowered.model) and not lowered.regions and not lowered.model.functions
    other = lower_file(plain, LowerOptions())
    kinds = [Counter(n.op_type for n in m.model.graph.node if n.op_type != "Constant") for m in (lowered, other)]
    assert kinds[0] == kinds[1]
    assert (lowered.packed, lowered.flattened) == (other.packed, other.flattened)
    check(model, lowered, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})


@pytest.mark.parametrize("arch, precision, reason", [(80, "fp16", "compute capability"), (90, "fp32", "fp16 and bf16")])
def test_what_no_kernel_runs_is_left_and_says_why(tmp_path, rng, arch, precision, reason):
    model = exact(build_encoder(EncoderSpec(2, 64, 4, 2, SEQ), MASK))
    path = optimize(tmp_path, model, "--tune-budget", "60s")
    lowered = lower_file(path, LowerOptions(precision=precision, device=Device(arch)))
    left = [r for r in lowered.regions if not r.template]
    assert len(left) == 8 and all(reason in r.reason for r in left)
    assert {attributes_of(n)["template"] for n in regions(lowered.model)} == {"cubin"}
    check(model, lowered, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})


def test_weights_beyond_fp16_are_left(tmp_path, rng):
    model = build_encoder(EncoderSpec(1, 64, 4, 2, SEQ), MASK)
    (weight,) = (t for t in model.graph.initializer if t.name == "layer0/fc1/w")
    value = numpy_helper.to_array(weight).copy()
    value[0, 0] = 1e6
    weight.CopyFrom(numpy_helper.from_array(value, weight.name))
    lowered = lower_file(optimize(tmp_path, model, "--tune-budget", "60s", "--no-verify"), LowerOptions())
    (left,) = (r for r in lowered.regions if not r.template)
    assert "does not fit fp16" in left.reason


def test_dynamic_axes(tmp_path, rng):
    model = exact(build_encoder(EncoderSpec(2, 64, 4, "batch", "seq", seed=4), MASK))
    path = optimize(tmp_path, model, "--tune-budget", "60s", "--shape", f"x:1x8x64:2x{SEQ}x64")
    sizes = {"x": (2, SEQ, 64)}
    lowered = lower_file(path, LowerOptions(opt_sizes=sizes, largest_sizes=sizes))
    assert lowered.fused >= 8
    for batch, seq in ((1, 8), (2, SEQ), (2, 17)):
        check(model, lowered, {"x": rng.standard_normal((batch, seq, 64), np.float32)})


@pytest.mark.parametrize("decomposed", [False, True])
def test_weights_in_a_file_of_their_own(tmp_path, rng, decomposed):
    """All of them, down to the shapes that Reshape reads: the regions are those of the model in one file."""
    spec = EncoderSpec(2, 32, 4, 2, SEQ, "gemm", decomposed_norm=decomposed, seed=int(rng.integers(1 << 30)))
    model = exact(build_encoder(spec, MASK))
    names = {"layer0/rows", "layer1/rows", "to_heads"}  # some of them as Constant nodes, whose tensors go there as well
    moved = [t for t in model.graph.initializer if t.name in names]
    for i, tensor in enumerate(moved):
        model.graph.node.insert(i, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
        model.graph.initializer.remove(tensor)
    (tmp_path / "one").mkdir()
    whole = onnx.load(str(optimize(tmp_path / "one", model, "--tune-budget", "60s")))
    source, target = tmp_path / "m.onnx", tmp_path / "m.stof.onnx"
    onnx.save(
        model, str(source), save_as_external_data=True, location="w.bin", size_threshold=0, convert_attribute=True
    )
    assert cli.main(["optimize", str(source), "-o", str(target), "--no-engine", "--tune-budget", "60s"]) == 0
    parted = onnx.load(str(target))
    assert [n.op_type for n in parted.graph.node] == [n.op_type for n in whole.graph.node]
    feeds = {"x": rng.standard_normal((2, SEQ, 32), np.float32)}
    check(onnx.load(str(source)), lower_file(target, LowerOptions(device=Device(90))), feeds)


def test_a_plan_is_used_again(tmp_path, rng, capsys):
    """The regions of one run, in another one that searches nothing; and for other sizes there are none."""
    model = build_encoder(EncoderSpec(2, 64, 4, 2, SEQ), MASK)
    plan = tmp_path / "plan.json"
    first = optimize(tmp_path, model, "--tune-budget", "60s", "--plan", str(plan)).read_bytes()
    again = optimize(tmp_path, model, "--no-tune", "--plan", str(plan)).read_bytes()
    assert first == again
    fusion = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["fusion"]
    assert fusion["source"] == str(plan) and fusion["regions"]
    assert "    fused: " in capsys.readouterr().out
    wider = build_encoder(EncoderSpec(2, 128, 4, 2, SEQ), MASK)
    optimize(tmp_path, wider, "--no-tune", "--plan", str(plan))
    printed = capsys.readouterr().out
    assert "no fused regions: " in printed and "    fused: " not in printed
    fusion = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["fusion"]
    assert not fusion["regions"] and "other models or sizes" in fusion["reason"]


def test_a_plan_names_a_variant_that_there_is(tmp_path, capsys):
    """One that this version does not have would only fail on the GPU."""
    model = build_encoder(EncoderSpec(2, 64, 4, 2, SEQ), MASK)
    plan, lowered = tmp_path / "plan.json", tmp_path / "lowered.onnx"
    optimize(tmp_path, model, "--tune-budget", "60s", "--plan", str(plan))
    found = json.loads(plan.read_text(encoding="utf-8"))
    gemms = [r for b in found["blocks"] for r in b["regions"] if r["template"] == "gemm_epilogue"]
    assert gemms
    for region in gemms:
        region["config"] = "zzz"
    plan.write_text(json.dumps(found))
    capsys.readouterr()
    optimize(tmp_path, model, "--no-tune", "--plan", str(plan), "--emit-lowered", str(lowered), "--arch", "90")
    assert "left to TensorRT: its configuration 'zzz' is none of auto, " in capsys.readouterr().out
    assert not any(a.s == b"zzz" for n in onnx.load(str(lowered)).graph.node for a in n.attribute)


def test_without_a_gpu_nothing_is_fused_unless_asked(tmp_path):
    path = optimize(tmp_path, build_encoder(EncoderSpec(1, 64, 4, 2, SEQ), MASK))
    assert not any(n.op_type.startswith("StofFusedRegion") for n in onnx.load(str(path)).graph.node)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["fusion"] is None


@pytest.mark.parametrize(
    "options, message",
    [
        (("--no-tune", "--plan", "{}/none.json"), "no such plan"),
        (("--plan", "{}/model.onnx"), "input file"),
        (("--plan", "{}/text.json"), "not a fusion plan"),
        (("--tune-budget", "60s", "--no-tune"), "not allowed with"),
        (("--tune-budget", "soon"), "not a time"),
        (("--tune-budget", "0"), "not a time"),
        (("--precision", "fp32", "--plan", "{}/plan.json"), "--precision"),
    ],
)
def test_wrong_options(tmp_path, capsys, options, message):
    onnx.save(build_encoder(EncoderSpec(1, 64, 4, 2, SEQ), MASK), str(tmp_path / "model.onnx"))
    (tmp_path / "text.json").write_text("none")
    source = str(tmp_path / "model.onnx")
    output = ["-o", str(tmp_path / "out.onnx"), "--no-engine", "--no-verify"]
    if "plan.json" in options[-1]:
        assert (
            cli.main(["optimize", source, *output, "--tune-budget", "9s", "--plan", str(tmp_path / "plan.json")]) == 0
        )
        (tmp_path / "out.onnx").unlink()
    try:
        code = cli.main(["optimize", source, *output, *(o.format(tmp_path) for o in options)])
    except SystemExit as leave:
        code = int(str(leave.code))
    assert code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out.onnx").exists()


def test_a_gated_mlp_and_transposed_weights(tmp_path, rng):
    """LLaMA's feed-forward behind the encoder, and a Gemm whose weight is stored [N, K]: lowering turns it."""
    model = exact(build_encoder(EncoderSpec(1, 64, 4, 2, SEQ), MASK))
    graph, make = model.graph, onnx.helper.make_node
    graph.node[-1].output[0] = "h"
    weights = dict.fromkeys(("gate", "up"), (64, 128)) | {"down": (128, 64), "last": (64, 64)}
    for name, (depth, width) in weights.items():
        value = (rng.standard_normal((depth, width)) / 8).astype(np.float16).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(value, name))
    graph.initializer.append(numpy_helper.from_array(np.array([-1, 64], np.int64), "rows"))
    graph.initializer.append(numpy_helper.from_array(np.array([2, SEQ, 64], np.int64), "back"))
    graph.node.extend(
        [
            make("MatMul", ["h", "gate"], ["g"], "gate"),
            make("Sigmoid", ["g"], ["s"], "sigmoid"),
            make("Mul", ["g", "s"], ["a"], "silu"),
            make("MatMul", ["h", "up"], ["u"], "up"),
            make("Mul", ["a", "u"], ["p"], "gated"),
            make("MatMul", ["p", "down"], ["d"], "down"),
            make("Add", ["h", "d"], ["r"], "residual"),
            make("Reshape", ["r", "rows"], ["flat"], "to rows"),
            make("Gemm", ["flat", "last", "layer0/ln1/shift"], ["t"], "last", transB=1),
            make("Relu", ["t"], ["t2"], "relu"),
            make("Reshape", ["t2", "back"], ["y"], "back"),
        ]
    )
    path = optimize(tmp_path, model, "--tune-budget", "60s")
    lowered = lower_file(path, LowerOptions(device=Device(90)))
    found = Counter(str(attributes_of(n)["template"]) for n in regions(lowered.model))
    assert found["gated_mlp"] == 1
    gated = next(n for n in regions(lowered.model) if attributes_of(n)["template"] == "gated_mlp")
    assert (attributes_of(gated)["activation"], attributes_of(gated)["has_bias"], len(gated.input)) == ("silu", 0, 3)
    last = [n for n in regions(lowered.model) if attributes_of(n).get("activation") == "relu"]
    assert len(last) == 1
    turned = next(i for i in lowered.model.graph.initializer if i.name == last[0].input[1])
    original = next(numpy_helper.to_array(i) for i in model.graph.initializer if i.name == "last")
    np.testing.assert_array_equal(numpy_helper.to_array(turned), original.T.astype(np.float16))
    check(model, lowered, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})


def test_projections_that_are_not_packed_stay_operators(tmp_path, rng):
    """Without 2-D tensors nothing is packed: the region of the projections is inlined, and says so."""
    model = exact(build_encoder(EncoderSpec(1, 64, 4, 2, SEQ), MASK))
    path = optimize(tmp_path, model, "--tune-budget", "60s")
    portable = onnx.load(str(path))
    packed = [n for n in portable.graph.node if attributes_of(n).get("template") == "projections"]
    assert len(packed) == 1 and len(packed[0].output) == 3
    lowered = lower_file(path, LowerOptions(rank_2=False, device=Device(90)))
    (left,) = (r for r in lowered.regions if not r.template)
    assert "takes Q, K and V apart" in left.reason
    assert sum(n.op_type == "MatMul" for n in lowered.model.graph.node) == 3
    check(model, lowered, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})


def test_kernels_that_can_not_be_compiled_are_left(tmp_path, rng, monkeypatch):
    """Without Triton and without a cache of compiled kernels: norms stay TensorRT's, GEMMs are regions all the same."""
    model = exact(build_encoder(EncoderSpec(1, 64, 4, 2, SEQ), MASK))
    path = optimize(tmp_path, model, "--tune-budget", "60s")

    def refuse(items, arch):
        raise StofError("Triton is not installed", "kernels", "pip install 'stof-onnx[fusion]'")

    monkeypatch.setattr(region_nodes, "_compile", refuse)
    lowered = lower_file(path, LowerOptions(device=Device(90)))
    left = [r for r in lowered.regions if not r.template]
    assert len(left) >= 2 and all("Triton is not installed" in r.reason for r in left)
    assert {attributes_of(n)["template"] for n in regions(lowered.model)} == {"gemm_epilogue"}
    check(model, lowered, {"x": rng.standard_normal((2, SEQ, 64), np.float32)})
