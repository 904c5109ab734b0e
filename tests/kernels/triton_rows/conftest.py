"""The GPU that row programs are run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stof_onnx.errors import StofError
from stof_onnx.trt import cuda


@pytest.fixture(scope="module")
def arch() -> Iterator[int]:
    try:
        capability, _ = cuda.capability()
    except StofError as error:
        pytest.skip(str(error))
    yield capability
