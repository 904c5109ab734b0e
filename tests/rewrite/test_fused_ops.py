"""Fused attention operators: each is replaced and equal to ONNX Runtime's own kernel, or refused with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.attention.fused_ops import is_fused, match_fused
from stof_onnx.attention.match import find_attention
from stof_onnx.attention.rewrite import replace_attention
from stof_onnx.attention.types import AttentionMatch, KvKind, MaskedRow, Refusal
from stof_onnx.graph.fold import Folder
from stof_onnx.graph.model import LoadedModel, load_model
from stof_onnx.graph.save import save_model
from stof_onnx.graph.shapes import Scenario
from stof_onnx.options import OptimizeOptions

B, S, L, H, D = 2, 6, 10, 4, 8
N = H * D


@dataclass
class Op:
    """One node. `given` are its inputs in order (None: left out); those in `constants` become initializers."""

    op: str
    given: dict[str, np.ndarray | None]
    attributes: dict[str, object] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    domain: str = "com.microsoft"
    outputs: tuple[str, ...] = ("y",)
    opset: int = 23
    output_rank: int = 3

    def proto(self) -> onnx.ModelProto:
        names = [name if value is not None else "" for name, value in self.given.items()]
        node = helper.make_node(self.op, names, self.outputs, "site", domain=self.domain, **self.attributes)
        present = {k: v for k, v in self.given.items() if v is not None}
        inputs = [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in present.items()
            if k not in self.constants
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in self.outputs if name]
        for value in outputs:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            value.type.tensor_type.shape.dim.extend(
                [onnx.TensorShapeProto.Dimension() for _ in range(self.output_rank)]
            )
        weights = [numpy_helper.from_array(present[k], k) for k in self.constants]
        graph = helper.make_graph([node], "g", inputs, outputs, weights)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def feeds(self) -> dict[str, np.ndarray]:
        return {k: v for k, v in self.given.items() if v is not None and k not in self.constants}


def read(op: Op, tmp_path: Path, assume: bool = False) -> tuple[LoadedModel, AttentionMatch | Refusal]:
    onnx.save(op.proto(), tmp_path / "in.onnx")
    model = load_model(tmp_path / "in.onnx")
    folder = Folder(model, Scenario({i.name: tuple(i.shape) for i in model.graph.inputs}, {}))
    (node,) = (n for n in model.graph.nodes if is_fused(n))
    return model, match_fused(model, model.graph, node, folder, (), assume)


def check(op: Op, tmp_path: Path, assume: bool = False, atol: float = 5e-6) -> AttentionMatch:
    """Replaces the node and compares with ONNX Runtime's kernel on the inputs of `op`."""
    model, match = read(op, tmp_path, assume)
    assert isinstance(match, AttentionMatch), match
    (site,) = replace_attention(model, [match])
    assert site.removed == ("site",)
    save_model(model, tmp_path / "out.onnx")
    after = onnx.load(tmp_path / "out.onnx")
    assert op.op not in {n.op_type for n in after.graph.node}
    options = ort.SessionOptions()
    options.log_severity_level = 3
    paths = tmp_path / "in.onnx", tmp_path / "out.onnx"
    expected, actual = (ort.InferenceSession(p, options).run(None, op.feeds())[0] for p in paths)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=atol)
    return match


def refused(op: Op, tmp_path: Path, reason: str, assume: bool = False) -> None:
    _, match = read(op, tmp_path, assume)
    assert isinstance(match, Refusal) and reason in match.reason, match
    assert match.site == "site" and match.nodes == ("site",)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def qkv(rng: np.random.Generator, length: int = L, kv_heads: int = H) -> dict[str, np.ndarray | None]:
    return {"q": floats(rng, B, S, N), "k": floats(rng, B, length, kv_heads * D), "v": floats(rng, B, length, N)}


def padding(rng: np.random.Generator, length: int) -> np.ndarray:
    mask = (rng.random((B, length)) < 0.6).astype(np.int32)
    mask[:, 0] = 1
    return mask


def multi_head(given: dict[str, np.ndarray | None], *constants: str, **attributes: object) -> Op:
    return Op("MultiHeadAttention", given, {"num_heads": H, **attributes}, constants)


def test_multi_head_cross(rng: np.random.Generator, tmp_path: Path) -> None:
    match = check(multi_head(qkv(rng), scale=0.7), tmp_path)
    assert match.mask is None and match.kv_mask.kind is KvKind.NONE and match.scale == pytest.approx(0.7)


def test_multi_head_causal(rng: np.random.Generator, tmp_path: Path) -> None:
    match = check(multi_head(qkv(rng, S), unidirectional=1), tmp_path)
    assert match.mask is not None and match.mask.s_q == S
    refused(multi_head(qkv(rng), unidirectional=1), tmp_path, "diagonal")


@pytest.mark.parametrize("fill", [-10000.0, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("static", [False, True])
def test_multi_head_padding(rng: np.random.Generator, tmp_path: Path, fill: float, static: bool) -> None:
    mask = padding(rng, L)
    mask[1] = 0  # a row without keys
    given = {**qkv(rng), "b": None, "m": mask}
    # -10000 costs the scores of an empty row their last digits in ONNX Runtime's kernel.
    tolerance = 5e-3 if fill == -10000.0 else 5e-6
    match = check(multi_head(given, *["m"] * static, mask_filter_value=fill), tmp_path, atol=tolerance)
    assert match.masked_row is (MaskedRow.SCORES if fill == -10000.0 else MaskedRow.MEAN)
    assert (match.mask is not None) is static and (match.kv_mask.kind is KvKind.MASK) is not static


def test_multi_head_lengths(rng: np.random.Generator, tmp_path: Path) -> None:
    given = {**qkv(rng), "b": None, "m": np.array([L, 3], np.int32)}
    assert check(multi_head(given), tmp_path).kv_mask.kind is KvKind.LENGTH
    assert check(multi_head(given, "m"), tmp_path).mask is not None


def test_multi_head_mask_of_rank_3(rng: np.random.Generator, tmp_path: Path) -> None:
    mask = (rng.random((B, S, L)) < 0.5).astype(np.int32)
    mask[:, :, 2] = 1
    given = {**qkv(rng), "b": None, "m": mask}
    assert check(multi_head(given, "m"), tmp_path).mask is not None
    refused(multi_head(given), tmp_path, "run-time mask of shape [2, 6, 10]")


def test_multi_head_causal_with_padding(rng: np.random.Generator, tmp_path: Path) -> None:
    given = {**qkv(rng, S), "b": None, "m": padding(rng, S)}
    op = multi_head(given, unidirectional=1)
    refused(op, tmp_path, "--assume-no-empty-rows")
    check(op, tmp_path, assume=True)
    check(multi_head(given, "m", unidirectional=1), tmp_path)
    given["m"][0, 0] = 0  # type: ignore[index]
    refused(multi_head(given, "m", unidirectional=1), tmp_path, "a row sees no key")


def test_multi_head_fill_values(rng: np.random.Generator, tmp_path: Path) -> None:
    given = {**qkv(rng), "b": None, "m": padding(rng, L)}
    refused(multi_head(given, mask_filter_value=-100.0), tmp_path, "does not hide")
    refused(multi_head(given, mask_filter_value=-1e9), tmp_path, "only part of a score")


@pytest.mark.parametrize("shape", [(B, H, S, L), (1, H, S, L), (1, 1, S, L)])
def test_multi_head_attention_bias(rng: np.random.Generator, tmp_path: Path, shape: tuple[int, ...]) -> None:
    given = {**qkv(rng), "b": None, "m": padding(rng, L), "ab": floats(rng, *shape)}
    check(multi_head(given), tmp_path)


def test_multi_head_attention_bias_in_half_precision(rng: np.random.Generator, tmp_path: Path) -> None:
    """Constants that a row holds alone do not mean the same in float16 and float32; unknown ones are noted."""
    half = {k: v.astype(np.float16) for k, v in qkv(rng).items() if v is not None}
    left: dict[str, np.ndarray | None] = {"projection": None, "padding": None}
    bias = np.where(np.arange(L) < 4, -65504, 0) * np.ones((1, 1, S, 1))
    op = multi_head({**half, **left, "bias": bias.astype(np.float16)}, "bias", num_heads=H)
    assert isinstance(read(op, tmp_path)[1], AttentionMatch)
    bias[..., 2, :] = -65504
    op = multi_head({**half, **left, "bias": bias.astype(np.float16)}, "bias", num_heads=H)
    refused(op, tmp_path, "keeps only part of each score")
    for match in (read(op, tmp_path, assume=True)[1], read(replace(op, constants=()), tmp_path)[1]):
        assert isinstance(match, AttentionMatch) and len(match.notes) == 1, match


@pytest.mark.parametrize("keys_as_heads", [False, True])
def test_multi_head_projection_bias(rng: np.random.Generator, tmp_path: Path, keys_as_heads: bool) -> None:
    given = {**qkv(rng), "b": floats(rng, 3 * N)}
    if keys_as_heads:
        given |= {"k": floats(rng, B, H, L, D), "v": floats(rng, B, H, L, D)}
        given["b"][N:] = 0  # type: ignore[index]
    check(multi_head(given, "b"), tmp_path)
    refused(multi_head(given), tmp_path, "projection bias is known only at run time")


def test_multi_head_packed(rng: np.random.Generator, tmp_path: Path) -> None:
    """ONNX Runtime's CPU kernel does not take packed tensors: compare with the same values unpacked."""
    parts = [floats(rng, B, S, H, D) for _ in range(3)]
    flat = dict(zip("qkv", (p.reshape(B, S, N) for p in parts), strict=True))
    options = ort.SessionOptions()
    expected = ort.InferenceSession(multi_head(flat).proto().SerializeToString(), options).run(None, flat)[0]
    for given in (
        {"q": np.stack(parts, 3)},
        {"q": flat["q"], "kv": np.stack(parts[1:], 3)},
    ):
        model, match = read(multi_head(given), tmp_path)
        assert isinstance(match, AttentionMatch), match
        replace_attention(model, [match])
        save_model(model, tmp_path / "out.onnx")
        (actual,) = ort.InferenceSession(tmp_path / "out.onnx").run(None, given)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=5e-6)


def test_multi_head_cache_and_extra_outputs(rng: np.random.Generator, tmp_path: Path) -> None:
    past = floats(rng, B, H, 3, D)
    given = {**qkv(rng), "b": None, "m": None, "ab": None, "pk": past, "pv": past}
    refused(multi_head(given), tmp_path, "input past_key is given")
    op = multi_head(qkv(rng))
    op.outputs = ("y", "present_k", "present_v")
    refused(op, tmp_path, "output present_key is used")


def projected(rng: np.random.Generator, *constants: str, mask: np.ndarray | None = None, **attributes: object) -> Op:
    given = {"x": floats(rng, B, S, 16), "w": floats(rng, 16, 3 * N) / 4, "b": floats(rng, 3 * N), "m": mask}
    return Op("Attention", given, {"num_heads": H, **attributes}, ("w", "b", *constants))


def test_microsoft_attention(rng: np.random.Generator, tmp_path: Path) -> None:
    check(projected(rng), tmp_path)
    assert check(projected(rng, unidirectional=1), tmp_path).mask is not None
    assert check(projected(rng, mask=padding(rng, S)), tmp_path).kv_mask.kind is KvKind.MASK
    assert check(projected(rng, mask=np.array([4, S], np.int32)), tmp_path).kv_mask.kind is KvKind.LENGTH
    ends_and_starts = np.array([S, 5, 1, 2], np.int32)
    assert check(projected(rng, "m", mask=ends_and_starts), tmp_path).mask is not None
    refused(projected(rng, mask=ends_and_starts), tmp_path, "run-time mask of shape [4]")


def test_names_the_model_already_has_are_not_taken(rng: np.random.Generator, tmp_path: Path) -> None:
    op = projected(rng)
    op.given = {{"x": "split", "w": "site/stof_qkv"}.get(name, name): value for name, value in op.given.items()}
    op.constants = ("split", "site/stof_qkv", "b")
    check(op, tmp_path)


def test_microsoft_attention_with_other_value_size(rng: np.random.Generator, tmp_path: Path) -> None:
    op = projected(rng, qkv_hidden_sizes=[N, N, 2 * N])
    op.given |= {"w": floats(rng, 16, 4 * N) / 4, "b": floats(rng, 4 * N)}
    check(op, tmp_path)


def grouped(
    rng: np.random.Generator,
    lengths: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    packed: bool = False,
    **attributes: object,
) -> Op:
    q, k, v = floats(rng, B, S, N), floats(rng, B, S, 2 * D), floats(rng, B, S, 2 * D)
    given: dict[str, np.ndarray | None] = {"q": q, "k": k, "v": v, "pk": None, "pv": None}
    if packed:
        given |= {"q": np.concatenate([q, k, v], -1), "k": None, "v": None}
    given["lengths"] = np.full(B, S - 1, np.int32) if lengths is None else lengths
    given |= {"total": np.array(S, np.int32), "cos": None, "sin": None, "ids": None, "ab": bias}
    attributes = {"num_heads": H, "kv_num_heads": 2, **attributes}
    return Op("GroupQueryAttention", given, attributes, ("lengths", "total"))


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"local_window_size": 1},
        {"local_window_size": 3},
        {"softcap": 0.7},
        {"scale": 0.2},
        {"packed": True},
        {"packed": True, "local_window_size": 2, "softcap": 1.5},
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_query(rng: np.random.Generator, tmp_path: Path, attributes: dict[str, object], biased: bool) -> None:
    bias = floats(rng, 1, H, S, S) if biased else None
    match = check(grouped(rng, bias=bias, **attributes), tmp_path)
    assert match.num_kv_heads == 2 and match.mask is not None


def test_grouped_query_refusals(rng: np.random.Generator, tmp_path: Path) -> None:
    refused(grouped(rng, lengths=np.array([S - 1, 2], np.int32)), tmp_path, "seqlens_k is not 5")
    run_time = grouped(rng)
    run_time.constants = ("total",)
    refused(run_time, tmp_path, "seqlens_k is known only at run time")
    rotary = grouped(rng, do_rotary=1)
    refused(rotary, tmp_path, "do_rotary")
    cached = grouped(rng)
    cached.given |= {"pk": floats(rng, B, 2, 3, D), "pv": floats(rng, B, 2, 3, D)}
    refused(cached, tmp_path, "past_key")


def onnx_attention(given: dict[str, np.ndarray | None], *constants: str, opset: int = 23, **attributes: object) -> Op:
    return Op("Attention", given, attributes, constants, "", opset=opset, output_rank=4)


def four_axes(rng: np.random.Generator) -> dict[str, np.ndarray | None]:
    return {"q": floats(rng, B, H, S, D), "k": floats(rng, B, 2, L, D), "v": floats(rng, B, 2, L, 2 * D)}


@pytest.mark.parametrize("shape", [(S, L), (B, 1, S, L), (B, H, S, L), (H, S, L)])
@pytest.mark.parametrize("kind", ["bool", "float", "-inf"])
@pytest.mark.parametrize("causal", [0, 1])
def test_onnx_run_time_mask(
    rng: np.random.Generator, tmp_path: Path, shape: tuple[int, ...], kind: str, causal: int
) -> None:
    keep = rng.random(shape) < 0.6
    keep[..., min(2, shape[-2] - 1), :] = False  # rows without keys give zeros
    mask = {"bool": keep, "float": floats(rng, *shape), "-inf": np.where(keep, 0, -np.inf).astype(np.float32)}[kind]
    check(onnx_attention({**four_axes(rng), "mask": mask}, is_causal=causal), tmp_path)


def test_onnx_lengths(rng: np.random.Generator, tmp_path: Path) -> None:
    lengths = np.array([L, 0], np.int64)
    given = {**four_axes(rng), "mask": None, "pk": None, "pv": None, "lengths": lengths}
    match = check(onnx_attention(given, opset=24), tmp_path)
    assert match.kv_mask.kind is KvKind.LENGTH and match.masked_row is MaskedRow.ZERO
    refused(onnx_attention(given, opset=24, is_causal=1), tmp_path, "nonpad_kv_seqlen")


def test_onnx_softcap(rng: np.random.Generator, tmp_path: Path) -> None:
    check(onnx_attention(four_axes(rng), softcap=0.5), tmp_path)
    refused(onnx_attention(four_axes(rng), softcap=0.5, is_causal=1), tmp_path, "softcap beside a mask")
    refused(onnx_attention(four_axes(rng), softmax_precision=11, is_causal=1), tmp_path, "float64")


@pytest.mark.parametrize("result_is_read_twice", [False, True])
def test_movement_around_the_operator_is_absorbed(
    rng: np.random.Generator, tmp_path: Path, result_is_read_twice: bool
) -> None:
    given = {"q": floats(rng, B, S, N), "k": floats(rng, B, L, 2 * D), "v": floats(rng, B, 2, L, D)}
    shapes = {
        "heads": [0, 0, -1, D],
        "expanded": [B, 2, H // 2, L, D],
        "flat": [B, H, L, D],
        "merged": [0, 0, -1],
        "two": [2],
    }
    weights = [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in shapes.items()]
    weights.append(numpy_helper.from_array(np.float32(0.5), "half"))
    node = helper.make_node
    nodes = [
        node("Reshape", ["q", "heads"], ["q4"]),
        node("Transpose", ["q4"], ["qt"], perm=[0, 2, 1, 3]),
        node("Mul", ["qt", "half"], ["qs"], "scale"),
        node("Reshape", ["k", "heads"], ["k4"]),
        node("Transpose", ["k4"], ["kt"], perm=[0, 2, 1, 3]),
    ]
    for x, source in (("k", "kt"), ("v", "v")):
        nodes += [
            node("Unsqueeze", [source, "two"], [f"{x}u"]),
            node("Expand", [f"{x}u", "expanded"], [f"{x}e"]),
            node("Reshape", [f"{x}e", "flat"], [f"{x}x"]),
        ]
    nodes += [
        node("Attention", ["qs", "kx", "vx"], ["core"], "site", is_causal=1),
        node("Transpose", ["core"], ["ot"], perm=[0, 2, 1, 3]),
        node("Reshape", ["ot", "merged"], ["y"]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [B, S, N])]
    if result_is_read_twice:
        nodes.append(node("Neg", ["core"], ["z"]))
        outputs.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [B, H, S, D]))
    inputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in given.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(proto, tmp_path / "in.onnx")
    model = load_model(tmp_path / "in.onnx")
    (match,), refusals = find_attention(model, OptimizeOptions())
    assert not refusals
    assert (match.q.name, match.k.name, match.v.name) == ("q", "k", "v")
    assert (match.num_heads, match.num_kv_heads) == (H, 2)
    assert match.scale == pytest.approx(0.5 / np.sqrt(D))
    assert match.output.name == ("core" if result_is_read_twice else "y")
    replace_attention(model, [match])
    left = {n.op for n in model.graph.nodes if n.domain != "stof"}
    assert left == ({"Transpose", "Reshape", "Neg"} if result_is_read_twice else set())
    save_model(model, tmp_path / "out.onnx")
    expected, actual = (ort.InferenceSession(tmp_path / f).run(None, given) for f in ("in.onnx", "out.onnx"))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=5e-6)
