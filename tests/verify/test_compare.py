"""Equal models pass; every small flaw is found, whatever the precision."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from polygraphy.json import save_json
from stof_onnx import pipeline
from stof_onnx.errors import StofError
from stof_onnx.graph.opset import OLDEST_OPSET
from stof_onnx.options import OptimizeOptions, parse_shapes
from stof_onnx.progress import Progress
from stof_onnx.verify.result import Verification

from tests.graph.builders import save_external
from tests.verify.models import HIDDEN, VOCAB, attention

SHAPES = parse_shapes(["ids:1x2:2x24:3x64"])


def _compare(folder: Path, a: onnx.ModelProto, b: onnx.ModelProto, **options: object) -> Verification:
    onnx.save(a, str(folder / "a.onnx"))
    onnx.save(b, str(folder / "b.onnx"))
    chosen = OptimizeOptions(**{"shapes": SHAPES, **options})  # type: ignore[arg-type]
    report = pipeline.verify(folder / "a.onnx", folder / "b.onnx", chosen, Progress())
    assert report.verification is not None
    print(report.verification.to_json())
    return report.verification


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("padding", [True, False])
def test_equal_models_pass(dtype: type, padding: bool, tmp_path: Path) -> None:
    result = _compare(tmp_path, attention(dtype, padding), attention(dtype, padding))
    assert result.passed and len(result.samples) == (5 if padding else 3)
    assert result.outputs[0].max_abs == 0


@pytest.mark.parametrize("flaw", ["mask", "scale"])
def test_flaws_are_found(flaw: str, tmp_path: Path) -> None:
    result = _compare(tmp_path, attention(), attention(flaw=flaw))
    assert not result.passed and "output 'y'" in result.failures[0]
    assert result.outputs[0].own_error is not None  # the higher-precision run was asked, and did not excuse it


def test_one_extra_key_is_found_in_half_precision(tmp_path: Path) -> None:
    assert not _compare(tmp_path, attention(np.float16), attention(np.float16, flaw="mask")).passed


def test_bfloat16_is_compared_in_float32(tmp_path: Path) -> None:
    result = _compare(tmp_path, attention(ml_dtypes.bfloat16), attention(ml_dtypes.bfloat16))
    assert result.passed and "in float32" in result.notes[-1]
    assert not _compare(tmp_path, attention(ml_dtypes.bfloat16), attention(ml_dtypes.bfloat16, flaw="mask")).passed


def test_seed_reproduces_the_inputs(tmp_path: Path) -> None:
    results = [_compare(tmp_path, attention(), attention(flaw="scale"), seed=7) for _ in range(2)]
    assert results[0].to_json() == results[1].to_json() and results[0].seed == 7


def test_inputs_from_a_file(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 30))
    save_json([{"ids": ids, "attention_mask": np.ones_like(ids)}], str(tmp_path / "in.json"))
    result = _compare(tmp_path, attention(), attention(), load_inputs=tmp_path / "in.json")
    assert result.passed and result.samples == ["in.json[0]"] and result.seed is None
    save_json([{"ids": ids}], str(tmp_path / "in.json"))
    with pytest.raises(StofError, match="does not hold the inputs"):
        _compare(tmp_path, attention(), attention(), load_inputs=tmp_path / "in.json")
    (tmp_path / "in.json").write_text("{")
    with pytest.raises(StofError, match="not a polygraphy JSON"):
        _compare(tmp_path, attention(), attention(), load_inputs=tmp_path / "in.json")


def test_external_data_on_both_sides(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        save_external(attention(), tmp_path / name / "m.onnx")
    options = OptimizeOptions(shapes=SHAPES)
    report = pipeline.verify(tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx", options, Progress())
    assert report.verification is not None and report.verification.passed


def test_models_that_do_not_belong_together(tmp_path: Path) -> None:
    with pytest.raises(StofError, match="different inputs"):
        _compare(tmp_path, attention(), attention(padding=False))


def test_sizes_that_the_original_refuses_are_skipped_and_noted(tmp_path: Path) -> None:
    result = _compare(tmp_path, attention(), attention(), shapes=parse_shapes(["ids:1x2:2x24:3x80"]))
    assert result.passed and len(result.samples) < 5 and "does not run with" in result.notes[0]


def test_nothing_that_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StofError, match="can not be verified"):
        _compare(tmp_path, attention(), attention(), shapes=parse_shapes(["ids:1x100"]))


def test_the_oldest_opset_needs_no_conversion() -> None:
    assert attention().opset_import[0].version == OLDEST_OPSET and HIDDEN == 16
