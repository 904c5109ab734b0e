"""The tolerance rule accepts rounding, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from stof_onnx.verify.judge import DIRECT, compare
from stof_onnx.verify.result import OutputError


def _error(want: np.ndarray, got: np.ndarray, truth: np.ndarray | None = None, **tolerance: float) -> OutputError:
    error = OutputError("y", str(want.dtype))
    compare(error, want, got, lambda: truth, **tolerance)
    return error


@pytest.fixture
def values(fresh_rng: np.random.Generator) -> np.ndarray:
    return fresh_rng.standard_normal((4, 33)).astype(np.float32)


def test_rounding_passes(values: np.ndarray) -> None:
    assert not _error(values, np.nextafter(values, np.float32(9))).problem


def test_one_wrong_element_fails(values: np.ndarray) -> None:
    wrong = values.copy()
    wrong[1, 2] += 1e-3
    error = _error(values, wrong)
    assert "differs by up to" in error.problem and error.max_abs == pytest.approx(1e-3, rel=1e-3)
    assert error.max_rel == pytest.approx(1e-3 / np.abs(values).max(), rel=1e-3)


def test_half_as_wrong_as_the_original_passes_with_a_reference(values: np.ndarray) -> None:
    truth = values.astype(np.float64)
    sloppy = values + np.float32(4e-4)  # the original's own error
    assert _error(sloppy, values).problem
    assert not _error(sloppy, values, truth).problem
    assert not _error(sloppy, values - np.float32(3e-4), truth).problem
    assert "against higher precision" in _error(sloppy, values - np.float32(2e-3), truth).problem


def test_a_reference_with_another_meaning_does_not_decide(values: np.ndarray) -> None:
    elsewhere = values.astype(np.float64) + 1
    assert "can not decide" in _error(values, values + np.float32(0.5), elsewhere).problem


@pytest.mark.parametrize(
    ("want", "got", "passes"),
    [
        (np.nan, np.nan, True),
        (np.nan, 0.0, False),
        (0.0, np.nan, False),
        (np.inf, np.inf, True),
        (np.inf, -np.inf, False),
        (np.inf, 1e30, False),
        (1.0, np.inf, False),
    ],
)
def test_nan_and_infinity_are_equal_only_to_themselves(
    values: np.ndarray, want: float, got: float, passes: bool
) -> None:
    a, b = values.copy(), values.copy()
    a[2, 5], b[2, 5] = want, got
    assert bool(_error(a, b).problem) is not passes


def test_all_nan() -> None:
    nan = np.full((2, 2), np.nan, np.float32)
    assert not _error(nan, nan).problem


def test_integers_are_exact() -> None:
    a = np.arange(6)
    assert not _error(a, a.copy()).problem
    assert "1 of 6" in _error(a, np.array([0, 1, 2, 3, 4, 6])).problem


def test_shape_and_dtype(values: np.ndarray) -> None:
    assert "shape" in _error(values, values[:2]).problem
    assert "dtype" in _error(values, values.astype(np.float64)).problem


def test_given_tolerance_replaces_the_rule(values: np.ndarray) -> None:
    assert not _error(values, values + np.float32(0.09), atol=0.1).problem
    assert _error(values, values + np.float32(0.11), atol=0.1).problem
    assert _error(values, np.nextafter(values, np.float32(9)), atol=0.0, rtol=0.0).problem


def test_zeros() -> None:
    zero = np.zeros(4, np.float32)
    assert not _error(zero, zero.copy()).problem
    assert _error(zero, zero + np.float32(1e-30)).problem


def test_every_float_type_has_a_tolerance_of_a_few_units() -> None:
    for name, direct in DIRECT.items():
        if name != "bfloat16":
            assert float(np.finfo(name).eps) <= direct <= 1e6 * float(np.finfo(name).eps)


def test_the_problem_tells_of_the_largest_difference_that_is_printed(values: np.ndarray) -> None:
    error = OutputError("y", "float32")
    for off in (1e-3, 5e-3, 2e-3):
        compare(error, values, values + np.float32(off), lambda: None)
    assert error.problem.startswith("differs by up to 0.005 ") and error.max_abs == pytest.approx(5e-3, rel=1e-3)
    compare(error, values, values.astype(np.float64), lambda: None)
    compare(error, values, values + np.float32(1), lambda: None)
    assert error.problem.startswith("dtype")
    assert set(error.to_json()) == {
        *("name", "dtype", "max_abs", "max_rel", "limit", "own_error", "optimized_error", "problem")
    }
