"""Sites on sampled rows: the same verdicts as whole models, in a fraction of the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from stof_onnx import pipeline
from stof_onnx.errors import StofError
from stof_onnx.graph.inputs import apply_shapes
from stof_onnx.graph.model import load_model
from stof_onnx.options import EngineWishes, FusionWishes, OptimizeOptions, parse_shapes
from stof_onnx.progress import Progress
from stof_onnx.verify.compare import Side
from stof_onnx.verify.rows import METHOD
from stof_onnx.verify.run import Probes, verify_files

from benchmarks.encoder import EncoderSpec, build_encoder
from tests.verify.models import attention

# More than the masks need, less than whole models do.
LIMIT = 110_000


def _optimized(folder: Path, **options: object) -> tuple[Path, Path]:
    onnx.save(attention(**options), str(folder / "a.onnx"))  # type: ignore[arg-type]
    chosen = OptimizeOptions(shapes=parse_shapes(["ids:2x64"]), verify=False)
    report = pipeline.optimize(folder / "a.onnx", folder / "b.onnx", chosen, Progress())
    assert report.replaced == 1
    return folder / "a.onnx", folder / "b.onnx"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("padding", [True, False])
def test_a_right_replacement_passes(dtype: type, padding: bool, tmp_path: Path) -> None:
    onnx.save(attention(dtype, padding), str(tmp_path / "a.onnx"))
    options = OptimizeOptions(shapes=parse_shapes(["ids:2x64"]), memory_limit=LIMIT)
    report = pipeline.optimize(tmp_path / "a.onnx", tmp_path / "b.onnx", options, Progress())
    result = report.verification
    assert result is not None and result.passed and result.method == "sites on sampled rows"
    assert "instead" in result.notes[0] and report.sites[0].max_abs_err is not None


def test_a_wrong_mask_fails(tmp_path: Path) -> None:
    """The optimized model of a flawed twin is compared with the sound original."""
    _, wrong = _optimized(tmp_path, flaw="mask")
    onnx.save(attention(), str(tmp_path / "a.onnx"))
    options = OptimizeOptions(shapes=parse_shapes(["ids:2x64"]), memory_limit=LIMIT)
    report = pipeline.verify(tmp_path / "a.onnx", wrong, options, Progress())
    assert report.failed and "attention" in report.verification.failures[0]  # type: ignore[union-attr]


def test_dynamic_lengths_are_compared_at_the_largest(tmp_path: Path) -> None:
    onnx.save(attention(), str(tmp_path / "a.onnx"))
    options = OptimizeOptions(shapes=parse_shapes(["ids:1x2:2x64"]), memory_limit=LIMIT)
    report = pipeline.optimize(tmp_path / "a.onnx", tmp_path / "b.onnx", options, Progress())
    assert report.verification is not None and report.verification.passed
    assert all("2x64" in what for what in report.verification.samples)


def test_too_large_even_so(tmp_path: Path) -> None:
    a, b = _optimized(tmp_path)
    model = load_model(a)
    apply_shapes(model, parse_shapes(["ids:2x64"]))
    from stof_onnx.attention.match import find_attention

    options = OptimizeOptions(memory_limit=1000)
    matches, _ = find_attention(model, options)
    with pytest.raises(StofError, match="--memory-limit"):
        verify_files(model, Probes(matches), b, options)


def test_a_site_that_was_not_replaced_is_an_error(tmp_path: Path) -> None:
    a, _ = _optimized(tmp_path)
    options = OptimizeOptions(shapes=parse_shapes(["ids:2x64"]), memory_limit=LIMIT)
    with pytest.raises(StofError, match="not the output of a StofAttention node"):
        pipeline.verify(a, a, options, Progress())
    assert Side.read(a).tensors


@pytest.mark.parametrize("external", [False, True])
def test_everything_else_has_to_be_the_same(external: bool, tmp_path: Path) -> None:
    """Rows of attentions say nothing of other nodes and weights."""
    a, b = _optimized(tmp_path)
    options = OptimizeOptions(shapes=parse_shapes(["ids:2x64"]), memory_limit=LIMIT)
    for path in (a, b) if external else ():
        _save(onnx.load(str(path)), path, external)
    report = pipeline.verify(a, b, options, Progress())
    assert not report.failed and report.verification is not None
    assert report.verification.method == METHOD and "everything else is the same" in report.verification.notes[-1]

    sound = onnx.load(str(b))
    for change, message in (
        (_other_weight, "the weight 'wq' is not in the original"),
        (_other_attribute, r"the node '.*' \(MatMul\) is not in the original"),
        (_own_node, r"the node 'region' \(StofFusedRegion_0\) is not in the original"),
        (_new_function, "the function 'Half' is not in the original"),
    ):
        changed = onnx.ModelProto()
        changed.CopyFrom(sound)
        change(changed)
        _save(changed, b, external)
        with pytest.raises(StofError, match=message):
            pipeline.verify(a, b, options, Progress())


def _save(model: onnx.ModelProto, path: Path, external: bool) -> None:
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    onnx.save(model, str(path), save_as_external_data=external, location=f"{path.name}.data", size_threshold=512)


def _weight(model: onnx.ModelProto) -> onnx.TensorProto:
    return next(t for t in model.graph.initializer if t.name == "wq")


def _other_weight(model: onnx.ModelProto) -> None:
    values = onnx.numpy_helper.to_array(_weight(model)).copy()
    values[0, 0] += 1
    _weight(model).CopyFrom(onnx.numpy_helper.from_array(values, "wq"))


def _other_attribute(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "MatMul")
    node.doc_string = "another"


def _own_node(model: onnx.ModelProto) -> None:
    product = next(n for n in model.graph.node if n.op_type == "MatMul")
    node = onnx.helper.make_node("StofFusedRegion_0", product.input[:1], list(product.output), "region", domain="stof")
    product.CopyFrom(node)
    body = [onnx.helper.make_node("Identity", ["x"], ["y"])]
    opsets = [onnx.helper.make_opsetid("", 17)]
    model.functions.append(onnx.helper.make_function("stof", "StofFusedRegion_0", ["x"], ["y"], body, opsets))


def _new_function(model: onnx.ModelProto) -> None:
    body = [onnx.helper.make_node("Identity", ["x"], ["y"])]
    model.functions.append(onnx.helper.make_function("mine", "Half", ["x"], ["y"], body, model.opset_import))


def test_fused_regions_are_not_said_to_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))
    a, b = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(build_encoder(EncoderSpec(2, 64, 4, 1, 64), np.tri(64, dtype=bool)), str(a))
    fusion = FusionWishes(tune=True)
    options = OptimizeOptions(memory_limit=400_000, fusion=fusion, engine=EngineWishes(wanted=False))
    report = pipeline.optimize(a, b, options, Progress())
    result = report.verification
    assert result is not None and result.method == METHOD and report.fusion is not None and report.fusion.applied
    assert "fused regions are made of the original's operators: they were not compared" in result.notes
    with pytest.raises(StofError, match="StofFusedRegion"):
        pipeline.verify(a, b, options, Progress())


@pytest.mark.parametrize(("windows", "flat"), [(1, True), (2, False), (2, True)])
def test_windows_and_flat_outputs(windows: int, flat: bool, tmp_path: Path) -> None:
    """Several windows an entry are a batch size that no input has; a product may read [B * S, H * D]."""
    a, b, length = tmp_path / "a.onnx", tmp_path / "b.onnx", 64 // windows
    onnx.save(_windowed(windows, flat), str(a))
    options = OptimizeOptions(memory_limit=6 * 4 * length * length + 10_000, engine=EngineWishes(wanted=False))
    report = pipeline.optimize(a, b, options, Progress())
    result = report.verification
    assert report.replaced == 1 and result is not None and result.passed and result.method == METHOD
    assert any(n.name.endswith("stof_flatten") for n in onnx.load(str(b)).graph.node) is flat
    assert not pipeline.verify(a, b, options, Progress()).failed

    onnx.save(_windowed(windows, flat, hidden=(20, 3)), str(a))
    assert pipeline.verify(a, b, options, Progress()).failed


def _windowed(windows: int, flat: bool, hidden: tuple[int, int] | None = None) -> onnx.ModelProto:
    """Causal attention of 2 heads of 8 within each of `windows` parts of 64 rows; `hidden` hides one more key."""
    rng, length = np.random.default_rng(3), 64 // windows
    mask = np.where(np.tri(length, dtype=bool), 0, -np.inf).astype(np.float32)
    if hidden is not None:
        mask[hidden] = -np.inf
    nodes, weights = [], []

    def const(name: str, value: object, dtype: type = np.float32) -> str:
        weights.append(onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def op(kind: str, *inputs: str, output: str, **attributes: object) -> str:
        nodes.append(onnx.helper.make_node(kind, list(inputs), [output], output, **attributes))
        return output

    x = op("Reshape", "x", const("parts", [2 * windows, length, 16], np.int64), output="windows")
    split = const("split", [0, 0, 2, 8], np.int64)
    heads = []
    for name, perm in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3))):
        product = op("MatMul", x, const(f"w{name}", rng.standard_normal((16, 16)) / 4), output=f"{name}_rows")
        heads.append(op("Transpose", op("Reshape", product, split, output=f"{name}_heads"), perm=perm, output=name))
    scores = op("Add", op("MatMul", heads[0], heads[1], output="scores"), const("mask", mask), output="masked")
    values = op("MatMul", op("Softmax", scores, axis=-1, output="p"), heads[2], output="values")
    merged = op("Transpose", values, perm=(0, 2, 1, 3), output="merged")
    rows = op("Reshape", merged, const("rows", [-1, 16] if flat else [0, 0, 16], np.int64), output="rows_of_values")
    out = op("MatMul", rows, const("wo", rng.standard_normal((16, 16)) / 4), output="projected")
    op("Reshape", out, const("whole", [2, 64, 16], np.int64), output="y")
    shape = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 64, 16]) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "g", shape[:1], shape[1:], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def test_products_that_onnx_runtime_fused(tmp_path: Path) -> None:
    onnx.save(attention(padding=False), str(tmp_path / "m.onnx"))
    session = ort.SessionOptions()
    session.optimized_model_filepath = str(tmp_path / "a.onnx")
    session.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    ort.InferenceSession(str(tmp_path / "m.onnx"), session, providers=["CPUExecutionProvider"])
    assert "FusedMatMul" in {n.op_type for n in onnx.load(str(tmp_path / "a.onnx")).graph.node}
    options = OptimizeOptions(shapes=parse_shapes(["ids:2x64"]), memory_limit=LIMIT)
    report = pipeline.optimize(tmp_path / "a.onnx", tmp_path / "b.onnx", options, Progress())
    assert report.verification is not None and report.verification.passed and report.verification.method == METHOD
