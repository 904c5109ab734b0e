"""The float64 reference on sampled rows against ONNX Runtime on all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stof_onnx.verify.session import Runner

from benchmarks.encoder import EncoderSpec, build_encoder, make_mask
from benchmarks.sampled_rows import sampled_output


@pytest.mark.parametrize("kind", ["window", "longformer", "bigbird", "causal"])
def test_rows_equal_those_of_the_whole_model(kind):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    spec, mask = EncoderSpec(1, 64, 4, 2, 320, seed=seed), make_mask(kind, 320)
    x = rng.standard_normal((2, 320, 64), np.float32)
    rows = np.sort(rng.choice(320, 40, replace=False))
    found = sampled_output(spec, mask, x, rows)
    whole = Runner(build_encoder(spec, mask), Path()).run({"x": x})["y"]
    assert found.count() == 2 * 40 * 64
    np.testing.assert_allclose(found[:, rows].data, whole[:, rows], rtol=1e-4, atol=1e-5)
