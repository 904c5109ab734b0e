"""Eq. 1 of the paper against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from stof_onnx.kernels.eq1 import eq1, row_wise_by_eq1
from stof_onnx.mask import encode, encode_bands
from stof_onnx.mask.sources import all_keys, causal, window


def test_values():
    # S = 1024: n = 64, log2 n = 6, tau / 36 = 0.0333.
    assert eq1(64, 64) == pytest.approx(64 / 4096 - 1.2 / 36)
    assert eq1(64 * 65 / 2, 64) == pytest.approx(0.507812 - 0.033333, abs=1e-6)
    # S = 32: n = 2, log2 n = 1: 3 of 4 tiles against 1.2.
    assert eq1(3, 2) == pytest.approx(0.75 - 1.2)
    assert eq1(1, 1) == -math.inf


def test_masks():
    assert not row_wise_by_eq1(encode_bands(causal(1024, 1024), 1024, 1024))
    assert row_wise_by_eq1(encode_bands(window(1024, 1024, 0, 0), 1024, 1024))  # 64 tiles of 4096: 0.016 < 0.033
    assert not row_wise_by_eq1(encode_bands(window(1024, 1024, 16, 16), 1024, 1024))  # 190 + 62: 0.046
    assert row_wise_by_eq1(encode_bands(all_keys(32, 32), 32, 32))  # 1 < 1.2


def test_masks_that_differ_count_by_their_uses():
    one = np.eye(1024, dtype=bool)
    two = np.ones((1024, 1024), bool)
    assert not row_wise_by_eq1(encode(np.stack([one, two])[None]))
    assert row_wise_by_eq1(encode(np.stack([one] * 100 + [two])[None, ::-1][:, [0] + [1] * 99]))
