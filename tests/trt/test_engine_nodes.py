"""Every kind of attention node inside TensorRT engines, against the contract's float64 definition.

All kinds share one engine a precision, since building takes seconds. Skipped without TensorRT and a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stof_onnx.attention.rewrite import replace_attention
from stof_onnx.attention.types import BiasKind, MaskedRow
from stof_onnx.graph.save import save_model
from stof_onnx.trt.availability import device, why_no_engine
from stof_onnx.trt.build import BuildOptions, build_engine
from stof_onnx.trt.engine_step import find_plugin_library
from stof_onnx.trt.lower import LowerOptions, lower_file, save_lowered
from stof_onnx.trt.session import EngineSession

from tests.rewrite.sites import Case, build, feeds, reference
from tests.trt.test_plugin_nodes import CASES, case, hiding_bias

pytestmark = [pytest.mark.trt, pytest.mark.gpu, pytest.mark.skipif(bool(why_no_engine()), reason=why_no_engine())]
TOLERANCE = {"fp16": 3e-3, "fp32": 2e-5}  # of the largest value; fp16 rounds Q, K and V, the weights and the result


def every_kind(rng: np.random.Generator) -> dict[str, Case]:
    """The static cases, head sizes of 64 among them, and biases that leave rows without keys."""
    kinds = {name: one for name, one in CASES.items() if not one.dynamic}
    kinds |= {f"{name}, 64 wide": replace(one, dim=64, v_dim=64, scale=0.125) for name, one in kinds.items()}
    for row in (MaskedRow.ZERO, MaskedRow.MEAN, MaskedRow.NAN):
        for late in (False, True):
            kinds[f"hiding bias, {row.value}, {'run time' if late else 'constant'}"] = case(
                bias_kind=BiasKind.DENSE, bias=hiding_bias(rng), bias_at_run_time=late, masked_row=row
            )
    return kinds


@pytest.fixture(scope="module", params=["fp16", "fp32"])
def outputs(request, tmp_path_factory):
    """Precision, and of each kind the engine's output and the reference."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    kinds = every_kind(rng)
    folder: Path = tmp_path_factory.mktemp("nodes")
    model, matches = build(list(kinds.values()), folder / "in.onnx")
    replace_attention(model, matches)
    save_model(model, folder / "out.onnx")
    lowered = lower_file(folder / "out.onnx", LowerOptions(precision=request.param, device=device()))
    assert lowered.plugins == len(kinds), [s for s in lowered.sites if not s.kernel]
    save_lowered(lowered.model, folder / "lowered.onnx")
    library = find_plugin_library()
    engine = build_engine(folder / "lowered.onnx", BuildOptions(request.param, plugins=library, embed=False, level=0))
    given = [feeds(one, i, rng) for i, one in enumerate(kinds.values())]
    session = EngineSession(engine.data, library)
    got = session.run({name: array for one in given for name, array in one.by_name.items()})
    session.close()
    wanted = [reference(one, i, g) for i, (one, g) in enumerate(zip(kinds.values(), given, strict=True))]
    return request.param, {name: (got[f"o{i}"], wanted[i]) for i, name in enumerate(kinds)}


@pytest.mark.parametrize("name", every_kind(np.random.default_rng(0)))
def test_node_in_an_engine(outputs, name):
    precision, found = outputs
    got, wanted = found[name]
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    finite = np.isfinite(wanted)
    error = np.abs(got.astype(np.float64) - wanted)[finite].max(initial=0.0)
    assert error <= TOLERANCE[precision] * np.abs(wanted[finite]).max()
