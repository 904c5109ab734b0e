"""The written file computes the node contract in ONNX Runtime and in ONNX's reference evaluator."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from ml_dtypes import bfloat16
from onnx.reference import ReferenceEvaluator
from stof_onnx.attention.rewrite import replace_attention
from stof_onnx.attention.types import BiasKind, KvKind, MaskedRow
from stof_onnx.graph.save import save_model

from tests.rewrite.sites import Case, build, feeds, reference

TOLERANCE = {np.float32: 2e-6, np.float16: 2e-3, np.float64: 1e-12, bfloat16: 2**-7}  # a few steps of the output
ROWS = list(MaskedRow)


def random_mask(case: Case, rng: np.random.Generator, per: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Empty, full and part tiles, and one row without keys."""
    allowed = rng.random((*per, case.seq_q, case.seq_kv)) < 0.4
    allowed[..., : case.tile, : case.tile] = True
    allowed[..., case.tile :, : case.tile] = False
    allowed[..., case.seq_q - 2, :] = False
    return allowed


def run(cases: list[Case], tmp_path: Path, opset: int = 17, declared: list[Case] | None = None) -> None:
    """Replaces every site, then compares both evaluators with the reference on fresh inputs."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    model, matches = build(declared or cases, tmp_path / "in.onnx", opset)
    replace_attention(model, matches)
    path = tmp_path / "out.onnx"
    save_model(model, path)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    given = [feeds(case, i, rng) for i, case in enumerate(cases)]
    by_name = {name: array for f in given for name, array in f.by_name.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the evaluator's softmax of rows of -inf
        results = {"reference evaluator": ReferenceEvaluator(proto).run(None, by_name)}
    session = ort.InferenceSession(path)
    if not any(case.dtype is bfloat16 for case in cases):  # its Python interface takes no bfloat16 arrays
        results["onnxruntime"] = session.run(None, by_name)
    for i, case in enumerate(cases):
        expected = reference(case, i, given[i])
        for evaluator, outputs in results.items():
            assert outputs[i].dtype == case.dtype and outputs[i].shape == expected.shape
            np.testing.assert_allclose(
                outputs[i].astype(np.float64),
                expected,
                rtol=TOLERANCE[case.dtype],
                atol=TOLERANCE[case.dtype],
                err_msg=f"{evaluator}, {case}",
            )


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("opset", [17, 18, 20, 21, 23, 24])
@pytest.mark.parametrize("row", ROWS)
def test_static_mask(row: MaskedRow, opset: int, rng: np.random.Generator, tmp_path: Path) -> None:
    case = Case(seq_q=37, seq_kv=45, masked_row=row)
    run([replace(case, allowed=random_mask(case, rng))], tmp_path, opset)


@pytest.mark.parametrize("kv", [KvKind.MASK, KvKind.LENGTH])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("masked", [False, True])
def test_run_time_padding(kv: KvKind, row: MaskedRow, masked: bool, rng: np.random.Generator, tmp_path: Path) -> None:
    case = Case(masked_row=row, kv_kind=kv)
    run([replace(case, allowed=random_mask(case, rng) if masked else None)], tmp_path)


@pytest.mark.parametrize(
    ("dtype", "invert"), [(np.bool_, False), (np.bool_, True), (np.int32, True), (np.float32, False)]
)
@pytest.mark.parametrize("rank", [2, 4])
def test_padding_of_any_dtype(dtype: type, invert: bool, rank: int, tmp_path: Path) -> None:
    run([Case(kv_kind=KvKind.MASK, kv_dtype=dtype, kv_rank=rank, invert=invert)], tmp_path)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize(
    "layouts",
    [
        ("BSHD", "BSHD", "BSHD", "BSHD"),
        ("BHSD", "BHSD", "BSHD", "BSHD"),
        ("BSHD", "BSHD", "BHSD", "BHSD"),
        ("BSHD", "BHSD", "BSHD", "BHSD"),
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_layouts_and_grouped_heads(
    layouts: tuple[str, str, str, str], kv_heads: int, rank: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    case = Case(heads=6, kv_heads=kv_heads, seq_q=11, seq_kv=17, dim=8, v_dim=16, layouts=layouts, rank=rank)
    run([replace(case, allowed=random_mask(case, rng, (1, 6)))], tmp_path)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, bfloat16])
@pytest.mark.parametrize("row", ROWS)
def test_other_dtypes(dtype: type, row: MaskedRow, rng: np.random.Generator, tmp_path: Path) -> None:
    case = Case(dtype=dtype, masked_row=row, kv_kind=KvKind.MASK, softcap=5.0)
    run([replace(case, allowed=random_mask(case, rng))], tmp_path)


@pytest.mark.parametrize("per", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_masks_by_batch_and_head(per: tuple[int, int], rng: np.random.Generator, tmp_path: Path) -> None:
    case = Case()
    run([replace(case, allowed=random_mask(case, rng, per))], tmp_path)


@pytest.mark.parametrize("at_run_time", [False, True])
@pytest.mark.parametrize("per", [(1, 1), (2, 3)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv", list(KvKind))
def test_dense_bias(
    per: tuple[int, int], masked: bool, kv: KvKind, at_run_time: bool, rng: np.random.Generator, tmp_path: Path
) -> None:
    case = Case(softcap=2.0, kv_kind=kv, masked_row=MaskedRow.MEAN)
    bias = rng.standard_normal((*per, case.seq_q, case.seq_kv)).astype(np.float32)
    bias[..., 3] = -np.inf  # one more hidden key, by the bias alone
    allowed = random_mask(case, rng) if masked else None
    case = replace(case, bias=bias, bias_kind=BiasKind.DENSE, bias_at_run_time=at_run_time, allowed=allowed)
    run([case], tmp_path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("row", [MaskedRow.ZERO, MaskedRow.MEAN, MaskedRow.NAN])
@pytest.mark.parametrize("at_run_time", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_the_bias_hides(
    dtype: type, row: MaskedRow, at_run_time: bool, masked: bool, rng: np.random.Generator, tmp_path: Path
) -> None:
    case = Case(dtype=dtype, masked_row=row, kv_kind=KvKind.MASK if masked else KvKind.NONE)
    bias = np.zeros((1, 1, 20, 20), dtype)
    bias[0, 0, 4] = -np.inf
    allowed = random_mask(case, rng) if masked else None
    case = replace(case, bias=bias, bias_kind=BiasKind.DENSE, bias_at_run_time=at_run_time, allowed=allowed)
    run([case], tmp_path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(20,), (20, 20), (3, 1, 20), (2, 1, 1, 20), (2, 3, 20, 20), (20, 13)])
@pytest.mark.parametrize("opset", [17, 23])
def test_run_time_masks_of_any_shape(
    dtype: type, shape: tuple[int, ...], opset: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    for bias in (rng.random(shape) < 0.5, rng.standard_normal(shape).astype(dtype)):
        run([Case(dtype=dtype, bias=bias, bias_kind=BiasKind.DENSE, bias_at_run_time=True)], tmp_path, opset)


@pytest.mark.parametrize("sizes", [(20, 20), (7, 33), (33, 7), (1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_relative_bias(
    sizes: tuple[int, int], heads: int, masked: bool, rng: np.random.Generator, tmp_path: Path
) -> None:
    rel_rq, rel_rk = sizes[0] + 2, sizes[1] + 3
    bias = rng.standard_normal((heads, rel_rq + rel_rk - 1)).astype(np.float32)
    case = Case(seq_q=sizes[0], seq_kv=sizes[1], bias=bias, bias_kind=BiasKind.RELATIVE, rel_rq=rel_rq)
    allowed = rng.random((1, 1, *sizes)) < 0.6 if masked else None
    run([replace(case, allowed=allowed, masked_row=MaskedRow.SCORES)], tmp_path)


@pytest.mark.parametrize("kv", list(KvKind))
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("relative", [False, True])
def test_shorter_sequences(
    kv: KvKind, row: MaskedRow, relative: bool, rng: np.random.Generator, tmp_path: Path
) -> None:
    largest = Case(seq_q=37, seq_kv=45, kv_kind=kv, masked_row=row, dynamic=True)
    largest = replace(largest, allowed=random_mask(largest, rng))
    if relative:
        bias = rng.standard_normal((3, 37 + 45 - 1)).astype(np.float32)
        largest = replace(largest, bias=bias, bias_kind=BiasKind.RELATIVE, rel_rq=37)
    for seq_q, seq_kv in [(37, 45), (20, 31), (36, 16), (1, 1)]:
        run([replace(largest, seq_q=seq_q, seq_kv=seq_kv, batch=3)], tmp_path, declared=[largest])


@pytest.mark.parametrize("kv", [KvKind.NONE, KvKind.MASK])
def test_sequences_that_nothing_bounds(kv: KvKind, tmp_path: Path) -> None:
    declared = Case(dynamic=True, kv_kind=kv, masked_row=MaskedRow.SCORES, seq_q=0, seq_kv=0)
    run([replace(declared, seq_q=12, seq_kv=30)], tmp_path, declared=[declared])
