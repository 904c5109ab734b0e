"""Sites on sampled rows: the same verdicts as whole models, in a fraction of the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from stof_onnx import pipeline
from stof_onnx.errors import StofError
from stof_onnx.graph.inputs import apply_shapes
from stof_onnx.graph.model import load_model
from stof_onnx.options import OptimizeOptions, parse_shapes
from stof_onnx.progress import Progress
from stof_onnx.verify.compare import Side
from stof_onnx.verify.run import Probes, verify_files

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
