"""Models without weights: what is taken out, what stays exact, and that filling in needs numpy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from stof_models.errors import ExportError
from stof_models.seeded import data_path, fill, manifest_path, strip, values_of


def _model(folder: Path, dtype: np.dtype, external: bool = False) -> tuple[Path, dict[str, np.ndarray]]:
    rng = np.random.default_rng(int(np.random.SeedSequence().entropy) % 2**32)
    q = np.arange(128)
    tensors = {
        "weight": (rng.standard_normal((96, 200)) * 0.3 + 0.1).astype(dtype),
        "mask": np.where(q[:, None] >= q, 0.0, -np.inf).astype(dtype),
        "table": rng.standard_normal(200).astype(dtype)[rng.integers(0, 200, (150, 150))],
        "small": rng.standard_normal(16).astype(dtype),
        "ids": rng.integers(0, 2**40, 9000),
    }
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "weights",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(dtype), [4, 96])],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(dtype), [4, 200])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    path = folder / "model.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, path, save_as_external_data=external, location="elsewhere.bin", size_threshold=0)
    return path, tensors


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_round_trip(tmp_path: Path, dtype: type, external: bool) -> None:
    path, tensors = _model(tmp_path, np.dtype(dtype), external)
    small = tmp_path / "small.onnx"
    assert [line["name"] for line in strip(path, small)] == ["weight"]
    assert small.stat().st_size < path.stat().st_size or external
    # As on the other machine: a fresh process, and neither torch nor onnx.
    code = "import sys; from stof_models.seeded import main; code = main(['fill', sys.argv[1]])\n"
    code += "assert not {'torch', 'onnx', 'transformers'} & set(sys.modules); sys.exit(code)"
    subprocess.run([sys.executable, "-c", code, str(small)], check=True, env={"PYTHONPATH": ":".join(sys.path)})
    first = data_path(small).read_bytes()
    fill(small)
    assert data_path(small).read_bytes() == first
    onnx.checker.check_model(str(small))
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(small)).graph.initializer}
    for name in tensors.keys() - {"weight"}:
        assert np.array_equal(found[name], tensors[name], equal_nan=name != "ids"), name
    drawn, weight = found["weight"].astype(np.float64), tensors["weight"].astype(np.float64)
    assert found["weight"].dtype == dtype and drawn.shape == weight.shape
    assert not np.array_equal(drawn, weight)
    assert abs(drawn.mean() - weight.mean()) < 5 * weight.std() / np.sqrt(weight.size)
    assert abs(drawn.std() / weight.std() - 1) < 0.05


def test_numbers_depend_on_the_line_alone() -> None:
    line = {"name": "a", "shape": [3, 5], "dtype": "float32", "mean": 0.0, "std": 1.0, "seed": 7, "offset": 0}
    assert np.array_equal(values_of(line), values_of({**line, "name": "b", "offset": 640}))
    assert not np.array_equal(values_of(line), values_of({**line, "seed": 8}))
    raw = np.random.PCG64(7).random_raw(1)[0]
    parts = [(int(raw) >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]
    want = (sum(parts) - 131070) / np.sqrt((65536**2 - 1) / 3)
    assert values_of(line)[0, 0] == np.float32(want)


def test_errors(tmp_path: Path) -> None:
    path, _ = _model(tmp_path, np.dtype(np.float32))
    with pytest.raises(ExportError, match="the model itself"):
        strip(path, path)
    with pytest.raises(ExportError, match="can not write in"):
        strip(path, tmp_path / "missing" / "small.onnx")
    with pytest.raises(ExportError, match="travels with the model"):
        fill(path)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    with pytest.raises(ExportError, match="does not load"):
        strip(broken, tmp_path / "small.onnx")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["broken.onnx", "model.onnx"]


def test_manifest_is_small_and_readable(tmp_path: Path) -> None:
    path, tensors = _model(tmp_path, np.dtype(np.float32))
    strip(path, tmp_path / "small.onnx")
    (line,) = json.loads(manifest_path(tmp_path / "small.onnx").read_text())
    assert line["shape"] == [96, 200] and line["dtype"] == "float32"
    assert line["std"] == pytest.approx(float(tensors["weight"].std(dtype=np.float64)))
