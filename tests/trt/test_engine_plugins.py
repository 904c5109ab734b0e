"""How engines find their plugins: inside, outside, both, of several builds; temporary directories; damaged bytes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from stof_onnx.errors import StofError
from stof_onnx.trt.manifest import plugin_library_of, read_manifest
from stof_onnx.trt.session import EngineSession

from tests.trt.engines import MARKS, Engines, run_python

pytestmark = MARKS
RUN = """
import sys, numpy as np
from pathlib import Path
from stof_onnx.errors import StofError
from stof_onnx.trt import availability, engine_step
from stof_onnx.trt.session import EngineSession
x = np.load(sys.argv[1])
try:
    %s
except StofError as error:
    sys.exit(f"refused: {error}")
"""


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    """Engines that were built apart have tactics of their own: equal to the rounding of fp16."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < 4e-3 * np.abs(expected).max()


@pytest.fixture
def case(engines: Engines, rng: np.random.Generator, tmp_path: Path):
    """An input file, and the outputs of the embedded engine for it."""
    feeds = engines.feeds(rng, 2, 50)
    np.save(tmp_path / "x.npy", feeds["x"])
    session = EngineSession(engines.embedded)
    expected = session.run(feeds)["y"]
    session.close()
    engines.assert_right(feeds, expected)
    return tmp_path, expected


def test_the_manifest_says_what_the_engine_needs(engines: Engines) -> None:
    inside, outside = read_manifest(engines.embedded), read_manifest(engines.outside)
    library = plugin_library_of(engines.outside)
    assert library is not None and plugin_library_of(engines.embedded) is None
    assert inside["plugin_library"]["embedded"] and not outside["plugin_library"]["embedded"]
    assert inside["arch"] == outside["arch"] >= 80 and inside["tensorrt"]
    assert inside["inputs"]["x"][1] == {"min": 16, "opt": 256, "max": 512}
    assert engines.embedded.stat().st_size > engines.outside.stat().st_size + library.stat().st_size // 2
    sizes = {engine.name: engine.stat().st_size for engine in (engines.embedded, engines.outside)}
    print(f"bytes: {sizes}, library {library.stat().st_size}")


def test_an_engine_without_its_library_runs_through_the_manifest(engines: Engines, case) -> None:
    folder, expected = case
    code = RUN % "np.save(sys.argv[3], engine_step.load_engine(Path(sys.argv[2])).run({'x': x})['y'])"
    done = run_python(code, folder / "x.npy", engines.outside, folder / "y.npy")
    assert done.returncode == 0, done.stderr
    assert_close(np.load(folder / "y.npy"), expected)


def test_without_manifest_or_with_another_library_the_message_says_what_is_missing(engines: Engines, case) -> None:
    folder, _ = case
    shutil.copy(engines.outside, folder / "alone.engine")
    code = RUN % "engine_step.load_engine(Path(sys.argv[2])).run({'x': x})"
    done = run_python(code, folder / "x.npy", folder / "alone.engine")
    assert done.returncode == 1 and "STOF_PLUGIN_LIBRARY" in done.stderr and "Traceback" not in done.stderr
    manifest = json.loads(engines.outside.with_suffix(".json").read_text(encoding="utf-8"))
    library = Path(manifest["plugin_library"]["path"])
    changed = folder / library.name
    changed.write_bytes(library.read_bytes() + b"\0")
    manifest["plugin_library"]["path"] = str(changed)
    (folder / "alone.json").write_text(json.dumps(manifest))
    done = run_python(code, folder / "x.npy", folder / "alone.engine")
    assert done.returncode == 1 and "is not the one" in done.stderr and str(changed) in done.stderr
    # Named by hand, it serves.
    done = run_python(code, folder / "x.npy", folder / "alone.engine", STOF_PLUGIN_LIBRARY=str(library))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ["outside first", "embedded first"])
def test_load_library_and_embedding_in_one_process(engines: Engines, case, order: str) -> None:
    folder, expected = case
    paths = [engines.outside, engines.embedded]
    code = RUN % (
        "sessions = [engine_step.load_engine(Path(p)) for p in sys.argv[3:]]\n"
        "    np.save(sys.argv[2], np.stack([s.run({'x': x})['y'] for s in sessions * 2]))"
    )
    done = run_python(code, folder / "x.npy", folder / "y.npy", *(paths if order == "outside first" else paths[::-1]))
    assert done.returncode == 0, done.stderr
    got = np.load(folder / "y.npy")
    np.testing.assert_array_equal(got[:2], got[2:])  # whichever ran in between
    for one in got:
        assert_close(one, expected)


def test_engines_with_plugins_of_two_builds_in_one_process(engines: Engines, case) -> None:
    """STOF_OTHER_PLUGIN_LIBRARY: one of another build; else a copy that differs in its bytes."""
    folder, expected = case
    library = plugin_library_of(engines.outside)
    assert library is not None
    other = Path(os.environ.get("STOF_OTHER_PLUGIN_LIBRARY") or folder / "libother.so")
    if not other.is_file():
        other.write_bytes(library.read_bytes() + b"\0")
    code = RUN % (
        "from stof_onnx import cli, options; from stof_onnx.trt.build import BuildOptions, build_engine\n"
        "    profile = {'x': tuple(options.DimRange(n, n, n) for n in x.shape)}\n"
        "    made = build_engine(Path(sys.argv[2]), BuildOptions('fp16', profile, Path(sys.argv[3]), level=0,\n"
        "        timing_cache=Path(sys.argv[5])))\n"
        "    Path(sys.argv[4]).write_bytes(made.data)"
    )
    lowered = folder / "lowered.onnx"
    engines.optimize("--no-engine", "--no-verify", "-o", str(folder / "o.onnx"), "--emit-lowered", str(lowered))
    second = folder / "second.engine"
    done = run_python(code, folder / "x.npy", lowered, other, second, folder / "tactics.bin")
    assert done.returncode == 0, done.stderr
    run = RUN % (
        "sessions = [EngineSession(Path(p)) for p in sys.argv[3:]]\n"
        "    np.save(sys.argv[2], np.stack([s.run({'x': x})['y'] for s in sessions * 2]))"
    )
    for paths in ((engines.embedded, second), (second, engines.embedded)):
        done = run_python(run, folder / "x.npy", folder / "y.npy", *paths)
        assert done.returncode == 0, done.stderr
        for got in np.load(folder / "y.npy"):
            assert_close(got, expected)


def noexec_folder() -> Path | None:
    """A folder that can be written, on a file system that runs nothing."""
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, place, _, options, *_ = line.split()
        if "noexec" in options.split(",") and "rw" in options.split(",") and os.access(place, os.W_OK):
            if place.startswith(("/proc", "/sys", "/dev/pts", "/dev/mqueue")):
                continue
            return Path(place)
    return None


@pytest.mark.parametrize("kind", ["noexec", "missing", "read-only"])
def test_a_temporary_directory_that_does_not_serve_is_named(engines: Engines, case, kind: str) -> None:
    """Either TensorRT does without it (files in memory), or one message names it and the way out, which then works."""
    folder, expected = case
    place = noexec_folder() if kind == "noexec" else Path("/proc/none" if kind == "missing" else "/proc/sys")
    if place is None:
        pytest.skip("no noexec file system here")
    code = RUN % "np.save(sys.argv[3], engine_step.load_engine(Path(sys.argv[2])).run({'x': x})['y'])"
    done = run_python(code, folder / "x.npy", engines.embedded, folder / "y.npy", TMPDIR=str(place))
    print(kind, place, done.returncode, done.stderr[-600:])
    if done.returncode == 0:
        np.testing.assert_array_equal(np.load(folder / "y.npy"), expected)
    else:
        assert "temporary directory" in done.stderr and "--no-embed" in done.stderr and "Traceback" not in done.stderr
    done = run_python(code, folder / "x.npy", engines.outside, folder / "z.npy", TMPDIR=str(place))
    assert done.returncode == 0, done.stderr
    assert_close(np.load(folder / "z.npy"), expected)


def test_damaged_engines_are_refused(engines: Engines, tmp_path: Path) -> None:
    data = engines.outside.read_bytes()
    plugin = data.index(b"STOF\1\0\0\0")  # the plugin's bytes inside the engine
    damaged = {
        "empty": b"",
        "text": b"an engine" * 100,
        "head": data[:100],
        "half": data[: len(data) // 2],
        "cut": data[:-1],
        "magic": bytes([data[0] ^ 0xFF]) + data[1:],
        "plugin": data[: plugin + 40] + bytes([data[plugin + 40] ^ 4]) + data[plugin + 41 :],
        "plugin mark": data[:plugin] + b"X" + data[plugin + 1 :],
    }
    # In a process of its own, each: what crashes shows as such.
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    code = (
        "import sys; from pathlib import Path; from stof_onnx.errors import StofError\n"
        "from stof_onnx.trt import availability; from stof_onnx.trt.session import EngineSession\n"
        "availability.load_plugins(Path(sys.argv[1]))\n"
        "for name in sys.argv[2:]:\n"
        "    try: EngineSession(Path(name)); print(name, 'LOADED', flush=True)\n"
        "    except StofError as error: print(name, 'refused', error, flush=True)"
    )
    library = plugin_library_of(engines.outside)
    assert library is not None
    done = run_python(code, library, *(tmp_path / name for name in damaged))
    print(done.stdout)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.count(" refused ") == len(damaged) and "LOADED" not in done.stdout


def test_an_engine_of_another_gpu_is_refused_before_it_is_loaded(engines: Engines, case) -> None:
    folder, _ = case
    shutil.copy(engines.outside, folder / "foreign.engine")
    manifest = json.loads(engines.outside.with_suffix(".json").read_text(encoding="utf-8"))
    (folder / "foreign.json").write_text(json.dumps(manifest | {"arch": 80, "gpu": "NVIDIA A100"}))
    from stof_onnx.trt.engine_step import load_engine

    with pytest.raises(StofError, match=r"built for compute capability 8\.0 \(NVIDIA A100\), this GPU has 9\.0"):
        load_engine(folder / "foreign.engine")
