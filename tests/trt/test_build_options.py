"""What a build sets in TensorRT's network, with a network stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from stof_onnx.errors import StofError
from stof_onnx.trt.build import _narrow_ends

TRT = SimpleNamespace(float32="float32", float16="float16")


def network(*types: str) -> SimpleNamespace:
    """As many inputs as outputs of these types."""
    inputs, outputs = ([SimpleNamespace(dtype=kind) for kind in types] for _ in range(2))
    return SimpleNamespace(
        num_inputs=len(types), get_input=inputs.__getitem__, num_outputs=len(types), get_output=outputs.__getitem__
    )


def test_float32_ends_alone_become_float16():
    made = network("float32", "int32", "float16")
    _narrow_ends(TRT, made, "fp16")
    for get in (made.get_input, made.get_output):
        assert [get(i).dtype for i in range(3)] == ["float16", "int32", "float16"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_keep_them(precision):
    with pytest.raises(StofError, match="--half-io"):
        _narrow_ends(TRT, network("float32"), precision)
