"""The commands around an engine as docs/deployment.md gives them: ours, polygraphy's, and the examples."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from polygraphy.json import load_json, save_json
from stof_onnx import cli
from stof_onnx.errors import StofError
from stof_onnx.trt.build import tactic_sources
from stof_onnx.trt.manifest import plugin_library_of
from stof_onnx.trt.toolchain import find_headers, find_nvcc

from tests.trt.engines import HIDDEN, MARKS, ROOT, SEQ, Engines, run_fresh, run_text

pytestmark = MARKS
EXAMPLES = ROOT / "examples"


def test_verify_in_a_fresh_process_needs_nothing_but_the_engine(engines: Engines, tmp_path: Path) -> None:
    engine = tmp_path / "alone.engine"  # without its manifest
    shutil.copy(engines.embedded, engine)
    done = run_fresh([sys.executable, "-m", "stof_onnx.cli", "verify", engines.model, engine])
    assert done.returncode == 0, done.stderr
    assert "computes the same as" in done.stdout and re.search(r"relative \d\.\d+e-0[3-9]", done.stdout)


def test_verify_tells_an_engine_of_another_model(engines: Engines, tmp_path: Path, capsys) -> None:
    other = onnx.ModelProto()
    other.CopyFrom(engines.proto)
    mask = next(t for t in other.graph.initializer if t.name == "mask")
    mask.CopyFrom(onnx.numpy_helper.from_array(np.zeros((1, 1, SEQ, SEQ), np.float32), "mask"))
    onnx.save(other, str(tmp_path / "other.onnx"))
    report = tmp_path / "r.json"
    assert cli.main(["verify", str(tmp_path / "other.onnx"), str(engines.embedded), "--report", str(report)]) == 1
    assert "does NOT compute the same" in capsys.readouterr().out
    assert json.loads(report.read_text(encoding="utf-8"))["engine_check"]["passed"] is False


def test_bench_against_an_engine_and_a_model(engines: Engines, capsys) -> None:
    against = engines.outside
    capsys.readouterr()  # what building it says
    assert cli.main(["bench", str(engines.embedded), "--against", str(against), "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    timed = [line for line in lines if "median" in line]
    assert [line.split(":")[0] for line in timed] == ["model.stof.engine", "outside.engine"]
    for line in timed:
        median, p90, p99 = (float(re.search(rf"{word} ([\d.]+)", line)[1]) for word in ("median", "p90", "p99"))
        assert 0 < median <= p90 <= p99 < 50 and "CUDA graph" in line and "MiB" in line
        assert 0 < float(re.search(r"loaded in ([\d.]+) s", line)[1]) < 60
        with capsys.disabled():
            print(line)
    assert lines[0] == f"inputs x 4x256x{HIDDEN}" and tactic_sources() in lines[-1]


@pytest.fixture
def inputs(engines: Engines, rng: np.random.Generator, tmp_path: Path) -> dict[str, np.ndarray]:
    """Also in `inputs.json` as polygraphy keeps them."""
    feeds = engines.feeds(rng, 2, 64)
    save_json([feeds], str(tmp_path / "inputs.json"))
    return feeds


def polygraphy(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    done = run_fresh([sys.executable, "-c", "from polygraphy.tools import main; main()", *arguments], folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def test_polygraphy_runs_an_engine(engines: Engines, inputs: dict[str, np.ndarray], tmp_path: Path) -> None:
    command = ["run", engines.embedded, "--trt", "--load-inputs", "inputs.json", "--save-outputs", "outputs.json"]
    polygraphy(tmp_path, *command)
    runs = load_json(str(tmp_path / "outputs.json"))
    engines.assert_right(inputs, next(iter(runs.values()))[0]["y"])


def test_polygraphy_builds_and_compares_a_lowered_model(
    engines: Engines, inputs: dict[str, np.ndarray], tmp_path: Path
) -> None:
    library = plugin_library_of(engines.outside)
    assert library is not None
    register = library.with_name("libstof_register.so")
    if not register.is_file():
        pytest.skip("the library has no libstof_register.so beside it")
    lowered = tmp_path / "lowered.onnx"
    engines.optimize("--no-engine", "--no-verify", "-o", str(tmp_path / "o.onnx"), "--emit-lowered", str(lowered))
    polygraphy(
        tmp_path, "run", engines.model, "--onnxrt", "--load-inputs", "inputs.json", "--save-outputs", "golden.json"
    )
    shapes = [f"x:[{b},{s},{HIDDEN}]" for b, s in ((1, 16), (4, 256), (8, SEQ))]
    ranges = [
        word
        for end, shape in zip(("min", "opt", "max"), shapes, strict=True)
        for word in (f"--trt-{end}-shapes", shape)
    ]
    tactics = ["--tactic-sources", *tactic_sources().split(",")] if tactic_sources() != "default" else []
    fast = ["--builder-optimization-level", "0", *tactics]
    done = polygraphy(
        tmp_path, "run", lowered, "--trt", "--plugins", register, "--fp16", *ranges, *fast,
        "--load-inputs", "inputs.json", "--load-outputs", "golden.json", "--atol", "2e-2", "--rtol", "1e-2",
        "--save-outputs", "outputs.json",
    )  # fmt: skip
    assert "PASSED" in done.stdout
    engines.assert_right(inputs, next(iter(load_json(str(tmp_path / "outputs.json")).values()))[0]["y"])


def test_polygraphy_inspects_an_engine(engines: Engines, tmp_path: Path) -> None:
    done = polygraphy(tmp_path, "inspect", "model", engines.embedded)
    assert "x" in done.stdout and "(4, 256" not in done.stderr and f"{HIDDEN}" in done.stdout


def test_the_python_example(engines: Engines, inputs: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", inputs["x"])
    library = plugin_library_of(engines.outside)
    assert library is not None
    for engine, options in ((engines.embedded, []), (engines.outside, ["--plugins", str(library)])):
        command = [sys.executable, EXAMPLES / "run_engine.py", engine, *options, f"x={tmp_path / 'x.npy'}"]
        done = run_fresh(command, tmp_path, PYTHONPATH=_site_only())
        assert done.returncode == 0, done.stderr
        engines.assert_right(inputs, np.load(tmp_path / "y.npy"))
        (tmp_path / "y.npy").unlink()


def _site_only() -> str:
    """Where tensorrt and numpy are, but not stof_onnx."""
    return ":".join(p for p in sys.path if p and Path(p).resolve() not in (ROOT, ROOT / "optimizer", ROOT / "models"))


def test_the_cpp_example(engines: Engines, inputs: dict[str, np.ndarray], tmp_path: Path) -> None:
    import tensorrt

    library = Path(tensorrt.__file__).parent / f"libnvinfer.so.{tensorrt.__version__.split('.')[0]}"
    compiler = shutil.which("g++")
    try:
        headers, cuda = find_headers(), find_nvcc().path.parents[1]
    except StofError as error:
        pytest.skip(str(error))
    if compiler is None or not library.is_file():
        pytest.skip("needs g++ and TensorRT's library")
    runtime = next(path for name in ("lib64", "lib") if (path := cuda / name / "libcudart_static.a").is_file())
    program = tmp_path / "run_engine"
    command = [
        compiler, "-std=c++17", EXAMPLES / "run_engine.cpp", f"-I{headers.folder}", f"-I{cuda / 'include'}",
        "-o", program,
        library, runtime, "-ldl", "-lrt", "-lpthread", "-Wl,--allow-shlib-undefined", f"-Wl,-rpath,{library.parent}",
    ]  # fmt: skip
    built = run_text(command)
    assert built.returncode == 0, built.stderr[-3000:]
    inputs["x"].tofile(tmp_path / "x.bin")
    text = f"x:{'x'.join(map(str, inputs['x'].shape))}={tmp_path / 'x.bin'}"
    plugins = plugin_library_of(engines.outside)
    assert plugins is not None
    for engine, options in ((engines.embedded, []), (engines.outside, ["--plugins", plugins])):
        done = run_fresh([program, engine, *options, text], tmp_path)
        assert done.returncode == 0, done.stderr
        got = np.fromfile(tmp_path / "y.bin", np.float32).reshape(inputs["x"].shape)
        engines.assert_right(inputs, got)
    wrong = run_fresh([program, engines.embedded, text.replace("2x64", "9x64")], tmp_path)
    assert wrong.returncode == 1 and "wrong shape of x" in wrong.stderr
