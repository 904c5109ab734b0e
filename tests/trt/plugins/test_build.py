"""`stof-onnx plugin`: what is found, what is missing, one build for many processes. A script stands in for CMake."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stof_onnx import cli
from stof_onnx.errors import StofError
from stof_onnx.trt import plugin_build, plugin_sources, toolchain

from tests.trt.plugins.host import Host

# Configures nothing; `--build DIR` takes a moment, leaves a mark and a library in DIR.
FAKE_CMAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo "cmake version {version}"; exit; fi
if [ "$1" = --build ]; then
  echo built >> "{marks}"
  sleep 0.5
  {outcome}
  printf '\\0getCreators\\0' > "$2/libstof_plugins.so"
  printf register > "$2/libstof_register.so"
else
  for argument; do [ -z "$next" ] || mkdir -p "$argument"; next=; [ "$argument" != -B ] || next=1; done
fi
"""


class Machine:
    """A machine of scripts: PATH has a cmake, an nvcc, a g++ and a make, and the cache is empty."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.bin, self.marks = folder, folder / "bin", folder / "marks"
        self.bin.mkdir()
        self.cmake()
        self.program("nvcc", 'echo "Cuda compilation tools, release 12.9, V12.9.1"')
        for name in ("g++", "make"):
            self.program(name, "exit 0")
        for tool in ("sh", "mkdir", "sleep", "cat", "echo"):
            found = shutil.which(tool)
            assert found
            (self.bin / tool).symlink_to(found)
        for name in (
            "CUDACXX",
            "CUDA_HOME",
            "CUDA_PATH",
            "CXX",
            "STOF_PLUGIN_LIBRARY",
            "LD_LIBRARY_PATH",
            "TENSORRT_ROOT",
        ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("STOF_CACHE_DIR", str(folder / "cache"))
        self.headers = folder / "headers"
        self.write_headers(10, 14, 1)
        monkeypatch.setenv("TENSORRT_INCLUDE_DIR", str(self.headers))

    def program(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.bin / name).chmod(0o755)

    def cmake(self, version: str = "3.25.1", outcome: str = "") -> None:
        text = FAKE_CMAKE.format(version=version, marks=self.marks, outcome=outcome)
        (self.bin / "cmake").write_text(text)
        (self.bin / "cmake").chmod(0o755)

    def write_headers(self, major: int, minor: int, patch: int) -> None:
        self.headers.mkdir(exist_ok=True)
        (self.headers / "NvInfer.h").write_text("")
        style = ("TRT_{}_ENTERPRISE", "NV_TENSORRT_{}")[major < 10]
        numbers = zip(("MAJOR", "MINOR", "PATCH"), (major, minor, patch), strict=True)
        lines = [f"#define {style.format(part)} {number} //!< a note" for part, number in numbers]
        (self.headers / "NvInferVersion.h").write_text("\n".join(lines))

    @property
    def builds(self) -> int:
        return len(self.marks.read_text(encoding="utf-8").split()) if self.marks.exists() else 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_built_once_and_then_found(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugin", "path", "--tensorrt", "11.4"]) == 2
    assert "stof-onnx plugin build" in capsys.readouterr().err
    for _ in range(2):
        assert cli.main(["plugin", "build", "--tensorrt", "11.4"]) == 0
    lines = capsys.readouterr().out.split()
    assert lines[0] == lines[1] and Path(lines[0]).is_file()
    assert machine.builds == 1
    assert cli.main(["plugin", "path", "--tensorrt", "11.4"]) == 0
    assert capsys.readouterr().out.split() == lines[:1]
    record = plugin_build.build_record(Path(lines[0]))
    assert record and (record.tensorrt, record.architectures, record.nvcc) == ("10.14.1", "80;90a", "12.9")
    left = {entry.name for entry in plugin_build.cache_folder().iterdir()}
    assert left == {Path(lines[0]).parent.name, f"{Path(lines[0]).parent.name}.lock"}


def test_versions_architectures_and_sources_have_libraries_of_their_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plugin_build.plugin_library("10.14")
    assert plugin_build.plugin_library("10.14", architectures="80") != first
    machine.write_headers(10, 15, 0)
    assert plugin_build.plugin_library("10.14") != first
    machine.write_headers(10, 14, 1)
    assert plugin_build.plugin_library("10.14") == first
    copy = machine.folder / "sources"
    for name in ("cuda", "trt_plugins"):
        shutil.copytree(plugin_sources.source_root() / name, copy / name)
    monkeypatch.setattr(plugin_build, "source_root", lambda: copy)
    assert plugin_build.plugin_library("10.14") == first
    changed = copy / "cuda" / "src" / "forward.cpp"
    changed.write_text(changed.read_text(encoding="utf-8") + "\n")
    assert plugin_build.plugin_library("10.14") != first
    assert machine.builds == 4


def test_processes_at_once_build_once(machine: Machine) -> None:
    code = "from stof_onnx.trt.plugin_build import plugin_library; print(plugin_library('10.14'))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert len(paths) == 1 and Path(paths.pop()).is_file()
    assert machine.builds == 1


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_an_interrupted_build_leaves_nothing_that_hinders(machine: Machine, sent: signal.Signals) -> None:
    """Not its compilers either, where it can still stop them; the next build works."""
    machine.cmake(outcome=f"echo $$ > '{machine.folder}/pid'; exec sleep 30")
    command = [sys.executable, "-m", "stof_onnx.cli", "plugin", "build", "--tensorrt", "10.14"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    pid = machine.folder / "pid"
    for _ in range(200):
        if pid.exists() and pid.read_text(encoding="utf-8").strip():
            break
        time.sleep(0.05)
    running.send_signal(sent)
    assert running.wait(timeout=20) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[sent]
    compiler, cache = int(pid.read_text(encoding="utf-8")), plugin_build.cache_folder()
    if sent is signal.SIGKILL:
        assert list(cache.glob(".build-*"))
        os.kill(compiler, signal.SIGKILL)  # nobody could
    else:
        with pytest.raises(ProcessLookupError):
            os.kill(compiler, 0)
        assert not list(cache.glob(".build-*"))
    assert not plugin_build.target("10.14").folder.exists()
    machine.cmake()
    assert plugin_build.plugin_library("10.14").is_file()
    assert not list(cache.glob(".build-*"))


def test_a_failing_build_says_why_and_leaves_nothing(machine: Machine) -> None:
    machine.cmake(outcome="echo 'src/x.cu(3): error: no such thing'; exit 2")
    with pytest.raises(StofError, match=r"error: no such thing(?s:.*)whole log: .*\.log"):
        plugin_build.plugin_library("10.14")
    assert not plugin_build.target("10.14").folder.exists()
    machine.cmake()
    assert plugin_build.plugin_library("10.14").is_file()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("cmake", "no CMake. pip install cmake"),
        ("make", "neither ninja nor make"),
        ("g++", r"no C\+\+ compiler"),
    ],
)
def test_what_is_missing_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch, broken: str, words: str) -> None:
    (machine.bin / broken).unlink()
    monkeypatch.setattr(sys, "executable", str(machine.folder / "python"))
    with pytest.raises(StofError, match=words):
        plugin_build.plugin_library("10.14")


def test_tools_that_are_too_old_are_named(machine: Machine) -> None:
    machine.cmake(version="3.22.1")
    with pytest.raises(StofError, match=r"CMake is older than 3\.24"):
        plugin_build.plugin_library("10.14")
    machine.program("nvcc", 'echo "release 11.8, V11.8.89"')
    with pytest.raises(StofError, match=r"nvcc 11\.8 is older than 12\.0"):
        plugin_build.plugin_library("10.14")


def test_headers_have_to_fit_the_runtime(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StofError, match=r"headers of TensorRT 10\.14\.1, but 8\.6\.0 shall load"):
        plugin_build.plugin_library("8.6.0")
    machine.write_headers(8, 5, 3)
    with pytest.raises(StofError, match=r"8\.5\.3 is older than 8\.6"):
        plugin_build.plugin_library("8.6.0")
    machine.write_headers(8, 6, 0)
    assert plugin_build.target("8.6.0").headers.version == (8, 6, 0)
    (machine.headers / "NvInfer.h").unlink()
    with pytest.raises(StofError, match="TENSORRT_INCLUDE_DIR"):
        plugin_build.plugin_library("8.6.0")
    machine.write_headers(9, 3, 0)
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{machine.folder / 'lib'}")
    (machine.folder / "include").symlink_to(machine.headers)
    assert toolchain.find_headers((8, 6, 1)).version == (9, 3, 0)


def test_a_library_serves_without_the_headers_it_was_built_with(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may have been given as --include once."""
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR")
    monkeypatch.setattr(toolchain, "_header_folders", lambda: iter(()))
    with pytest.raises(StofError, match=r"no headers of TensorRT 10\.14\.0.*--include"):
        plugin_build.plugin_library("10.14")
    built = plugin_build.plugin_library("10.14", include_dir=machine.headers)
    assert plugin_build.plugin_library("10.14") == built == plugin_build.plugin_library("11.4")
    assert cli.main(["plugin", "path", "--tensorrt", "10.14"]) == 0
    assert capsys.readouterr().out.strip() == str(built)
    machine.write_headers(11, 1, 0)
    newer = plugin_build.plugin_library("11.4", include_dir=machine.headers)
    assert plugin_build.plugin_library("11.4") == newer and plugin_build.plugin_library("10.14") == built
    for version, architectures in (("8.6.0", "80;90a"), ("10.14", "80")):
        with pytest.raises(StofError, match="no headers"):
            plugin_build.plugin_library(version, architectures=architectures)
    with pytest.raises(StofError, match=r"no NvInfer\.h"):
        plugin_build.plugin_library("10.14", include_dir=machine.folder)
    assert machine.builds == 2


def test_the_closest_headers_are_taken(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for version in ((10, 0, 1), (11, 4, 0), (10, 14, 1), (8, 6, 0)):
        machine.headers = machine.folder / "_".join(map(str, version))
        machine.write_headers(*version)
        folders.append(machine.headers)
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR")
    monkeypatch.setattr(toolchain, "_header_folders", lambda: iter(folders))
    wanted = {(10, 13, 0): (10, 14, 1), (10, 0, 0): (10, 0, 1), (11, 1, 0): (11, 4, 0), (9, 1, 0): (8, 6, 0)}
    assert {version: toolchain.find_headers(version).version for version in wanted} == wanted


def test_wheels_of_nvcc_that_miss_parts_are_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "nvidia" / "cu13"
    (root / "bin").mkdir(parents=True)
    shutil.move(machine.bin / "nvcc", root / "bin" / "nvcc")
    monkeypatch.setattr(toolchain, "_wheel_roots", lambda: iter([root]))
    monkeypatch.setattr(toolchain, "_USUAL_NVCC", tmp_path / "none")
    with pytest.raises(StofError, match="miss nvidia-cuda-cccl, nvidia-cuda-crt, nvidia-cuda-runtime, nvidia-nvvm"):
        toolchain.find_nvcc()


@pytest.mark.parametrize("text", ["80,90a", "sm_80", "", "80;"])
def test_malformed_architectures_are_refused(machine: Machine, text: str) -> None:
    with pytest.raises(StofError, match="no list of architectures"):
        plugin_build.plugin_library("10.14", architectures=text)


@pytest.mark.parametrize("text", ["ten", "10", ""])
def test_malformed_versions_are_refused(text: str) -> None:
    with pytest.raises(StofError, match="not a version"):
        toolchain.parse_version(text)


def test_a_cache_that_can_not_be_written_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.folder / "file").write_text("")
    monkeypatch.setenv("STOF_CACHE_DIR", str(machine.folder / "file"))
    with pytest.raises(StofError, match="Set STOF_CACHE_DIR"):
        plugin_build.plugin_library("10.14")


def test_info_never_fails(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    (machine.bin / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert cli.main(["plugin", "info", "--tensorrt", "10.14"]) == 0
    out = capsys.readouterr().out
    assert f"headers: {machine.headers} 10.14.1" in out
    assert "nvcc: missing" in out and "(not built)" in out


def test_a_chosen_library_has_to_fit(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOF_PLUGIN_LIBRARY", str(host.library))
    fits, other = ("11.4.0", "8.6.0") if host.v3 else ("8.6.0", "11.4.0")
    assert plugin_build.plugin_library(fits) == host.library.resolve()
    with pytest.raises(StofError, match=f"not a plugin library for TensorRT {other}"):
        plugin_build.plugin_library(other)
    monkeypatch.setenv("STOF_PLUGIN_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(StofError, match="no such file"):
        plugin_build.plugin_library(fits)
