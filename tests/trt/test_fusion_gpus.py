"""On which GPUs a search measures."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from stof_onnx.fusion.search.pool import TimerPool
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.options import OptimizeOptions
from stof_onnx.trt import cuda, fusion_step

from tests.fusion.synthetic import Synthetic


@pytest.mark.parametrize(
    ("visible", "models", "expected"),
    [
        ("", [b"H200", b"H200"], ["0", "1"]),
        ("", [b"H200"], ["0"]),
        ("", [b"H200", b"A100", b"H200"], ["0", "2"]),
        ("5,GPU-7f", [b"H200", b"H200"], ["5", "GPU-7f"]),
    ],
)
def test_gpus_alike(visible: str, models: list[bytes], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the first one's model, under the names that a process of their own is told."""

    def call(name: str, *arguments: int) -> object:
        return len(models) if name == "cudaGetDeviceCount" else SimpleNamespace(name=models[arguments[0]])

    monkeypatch.setattr(cuda, "call", call)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda.alike() == expected


@pytest.mark.parametrize(("missing", "gpus"), [("no GPU", []), ("", ["0"]), ("", ["0", "1"])])
def test_several_gpus_measure_side_by_side(missing: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_step.availability, "why_no_engine", lambda: missing)
    monkeypatch.setattr(fusion_step, "gpu_timer", lambda wishes: Synthetic())
    monkeypatch.setattr(cuda, "alike", lambda: gpus)
    with ExitStack() as stack:
        timer = fusion_step._timer(OptimizeOptions(), [], stack)
    assert isinstance(timer, Roofline) == bool(missing)
    assert (timer.devices if isinstance(timer, TimerPool) else len(gpus)) == len(gpus)
    assert isinstance(timer, TimerPool) == (len(gpus) > 1)
