"""Optimized models, lowered, and both evaluated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from stof_onnx import cli
from stof_onnx.trt.lower import Lowered, LowerOptions, lower_file

from tests.trt.engines import Engines
from tests.trt.plugin_reference import StofAttention


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def optimize(self, model: onnx.ModelProto, *options: str) -> Path:
        source, target = self.folder / "model.onnx", self.folder / "model.stof.onnx"
        onnx.save(model, str(source))
        assert cli.main(["optimize", str(source), "-o", str(target), "--no-verify", *options]) == 0
        return target

    def lower(self, path: Path, options: LowerOptions = LowerOptions()) -> Lowered:  # noqa: B008
        return lower_file(path, options)

    def assert_equal(self, model: onnx.ModelProto, lowered: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
        """Outputs of both agree to float32 rounding; the plugin runs in float64 from the arrays of `lowered`."""
        expected = ReferenceEvaluator(model).run(None, feeds)
        got = ReferenceEvaluator(lowered, new_ops=[StofAttention]).run(None, feeds)
        for a, b in zip(expected, got, strict=True):
            assert a.shape == b.shape
            assert np.isfinite(a).all()
            np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-5)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines.build(tmp_path_factory.mktemp("engines"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    request.node.user_properties.append(("seed", seed))
    print(f"seed {seed}")
    return np.random.default_rng(seed)
