"""The plugin library: built once for each state of the sources, TensorRT version and set of architectures, and cached.

The cache holds one folder a library, `<source hash>-trt<version>-sm<architectures>/`, with `libstof_plugins.so` and
`build.json`, and `libstof_register.so` for programs that only dlopen plugin libraries. A folder appears whole, by a
rename; a lock keeps two processes from building the same one, and whoever holds it removes what a killed build left.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from stof_onnx.errors import StofError
from stof_onnx.files import cache_root
from stof_onnx.trt import toolchain
from stof_onnx.trt.plugin_sources import source_hash, source_root

LIBRARY = "libstof_plugins.so"
REGISTER = "libstof_register.so"
ARCHITECTURES = "80;90a"
_RECORD = "build.json"


@dataclass(frozen=True)
class BuildRecord:
    """What a cached library was built from; `tensorrt` is the version of the headers."""

    source_hash: str
    tensorrt: str
    architectures: str
    nvcc: str
    date: str


@dataclass(frozen=True)
class Target:
    """A library that can be built: its sources, TensorRT's headers, architectures as in cuda/CMakeLists.txt."""

    sources: Path
    source_hash: str
    headers: toolchain.Headers
    architectures: str = ARCHITECTURES

    @property
    def folder(self) -> Path:
        architectures = self.architectures.replace(";", "_")
        return cache_folder() / f"{self.source_hash}-trt{self.headers.text}-sm{architectures}"

    @property
    def library(self) -> Path:
        return self.folder / LIBRARY


def cache_folder() -> Path:
    """The folder `plugins` of the cache."""
    return cache_root() / "plugins"


def target(
    tensorrt_version: str | None = None, include_dir: Path | None = None, architectures: str = ARCHITECTURES
) -> Target:
    """Which library serves `tensorrt_version` (default: the installed TensorRT, else whatever headers are found).

    Raises:
        StofError: no sources, no fitting headers, or malformed architectures.
    """
    if not re.fullmatch(r"\d+a?(;\d+a?)*", architectures):
        raise StofError(f"'{architectures}' is no list of architectures", "--architectures", "Write it as '80;90a'")
    version = tensorrt_version or toolchain.installed_tensorrt()
    headers = toolchain.find_headers(toolchain.parse_version(version) if version else None, include_dir)
    if headers.version[:2] < (8, 6):
        raise StofError(f"TensorRT {headers.text} is older than 8.6", str(headers.folder), "Use TensorRT 8.6 or newer")
    root = source_root()
    return Target(root, source_hash(root), headers, architectures)


def plugin_library(
    tensorrt_version: str | None = None,
    *,
    include_dir: Path | None = None,
    architectures: str = ARCHITECTURES,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """The plugin library for a TensorRT version: STOF_PLUGIN_LIBRARY, the cached one, or a new one.

    Args:
        tensorrt_version: as `tensorrt.__version__` says it; default as in `target`.
        include_dir: TensorRT's headers (default: TENSORRT_INCLUDE_DIR, else searched).
        architectures: as in cuda/CMakeLists.txt, "80;90a".
        say: told once, before a build of minutes.

    Raises:
        StofError: something is missing (with what to install), or the build fails (with the end of its log).
    """
    chosen = chosen_library()
    if chosen:
        version = tensorrt_version or toolchain.installed_tensorrt()
        if version:
            _check_adapter(chosen, toolchain.parse_version(version))
        return chosen
    wanted = _target_or_library(tensorrt_version, include_dir, architectures)
    if isinstance(wanted, Path):
        return wanted
    if not wanted.library.is_file():
        with _lock(wanted.folder, say):
            if not wanted.library.is_file():
                _build(wanted, say)
    return wanted.library


def library_path(
    tensorrt_version: str | None = None, include_dir: Path | None = None, architectures: str = ARCHITECTURES
) -> Path:
    """Where `plugin_library` has the library, or would build it; arguments and errors as there. Builds nothing."""
    chosen = chosen_library()
    if chosen:
        return chosen
    wanted = _target_or_library(tensorrt_version, include_dir, architectures)
    return wanted if isinstance(wanted, Path) else wanted.library


def _target_or_library(version: str | None, include_dir: Path | None, architectures: str) -> Target | Path:
    """What can be built; without headers a cached library, which was built with ones that are not found any more."""
    try:
        return target(version, include_dir, architectures)
    except StofError:
        built = None if include_dir else _built_library(version or toolchain.installed_tensorrt(), architectures)
        if built is None:
            raise
        return built


def _built_library(version: str | None, architectures: str) -> Path | None:
    """The library in the cache that was built of these sources and fits `version`, the closest one."""
    wanted = toolchain.parse_version(version) if version else None
    start, end = f"{source_hash(source_root())}-trt", f"-sm{architectures.replace(';', '_')}"
    found = []
    for library in cache_folder().glob(f"*/{LIBRARY}"):
        name = library.parent.name
        if name.startswith(start) and name.endswith(end):
            headers = toolchain.parse_version(name[len(start) : -len(end)])
            if wanted is None or toolchain.same_adapter(headers, wanted):
                distance = [abs(x - y) for x, y in zip(headers, wanted or headers, strict=True)]
                found.append((distance, str(library)))
    return Path(min(found)[1]) if found else None


def chosen_library() -> Path | None:
    """The library that STOF_PLUGIN_LIBRARY names, or None.

    Raises:
        StofError: it names no file.
    """
    text = os.environ.get("STOF_PLUGIN_LIBRARY")
    if not text:
        return None
    if not Path(text).is_file():
        raise StofError("no such file", f"STOF_PLUGIN_LIBRARY={text}", "Name a plugin library, or unset it")
    return Path(text).resolve()


def build_record(library: Path) -> BuildRecord | None:
    """How a cached library was built; None for one from elsewhere."""
    try:
        return BuildRecord(**json.loads((library.parent / _RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _check_adapter(library: Path, version: toolchain.Version) -> None:
    """A library exports getCreators (TensorRT 10 and newer) or getPluginCreators (older)."""
    symbol = "getCreators" if version[0] >= 10 else "getPluginCreators"
    if f"\0{symbol}\0".encode() not in library.read_bytes():
        text = ".".join(map(str, version))
        raise StofError(
            f"not a plugin library for TensorRT {text} (no {symbol})", str(library), "Unset it to build one"
        )


@contextlib.contextmanager
def _lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        advice = "Set STOF_CACHE_DIR to a folder that can be written"
        raise StofError(f"the cache can not be written ({error.strerror})", str(folder.parent), advice) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process builds the same plugins: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(wanted: Target, say: Callable[[str], None]) -> None:
    nvcc, cmake, cxx = toolchain.find_nvcc(), toolchain.find_cmake(), toolchain.find_cxx()
    generator, program = toolchain.find_generator()
    compiler = f"{nvcc.version[0]}.{nvcc.version[1]}"
    say(f"building the plugins for TensorRT {wanted.headers.text} with nvcc {compiler} (minutes, once)")
    log = wanted.folder.parent / f"{wanted.folder.name}.log"
    prefix = f".build-{wanted.folder.name}-"
    for left in wanted.folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=wanted.folder.parent) as name:
        work, staged = Path(name) / "work", Path(name) / "library"
        configure = [
            str(cmake), "-S", str(wanted.sources / "trt_plugins"), "-B", str(work), "-G", generator,
            f"-DCMAKE_MAKE_PROGRAM={program}", f"-DCMAKE_CUDA_COMPILER={nvcc.path}", f"-DCMAKE_CXX_COMPILER={cxx}",
            "-DCMAKE_BUILD_TYPE=Release", f"-DTENSORRT_INCLUDE_DIR={wanted.headers.folder}",
            f"-DSTOF_ARCHITECTURES={wanted.architectures}",
        ]  # fmt: skip
        environment = dict(os.environ)
        if nvcc.wheel_root:
            # The wheels have lib, not lib64, and no libcudart.so without a version.
            libraries = nvcc.wheel_root / "lib"
            configure += [f"-DCUDAToolkit_ROOT={nvcc.wheel_root}", f"-DCUDA_CUDART={libraries / 'libcudart_static.a'}"]
            environment["LIBRARY_PATH"] = f"{libraries}:{environment.get('LIBRARY_PATH', '')}".rstrip(":")
        jobs = environment.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(min(os.cpu_count() or 1, 8))
        compile_ = [str(cmake), "--build", str(work), "--target", "stof_plugins", "stof_register", "--parallel", jobs]
        with log.open("w") as output:
            for command in (configure, compile_):
                if _run(command, output, environment) != 0:
                    output.flush()
                    raise StofError(f"the build failed:\n{_errors(log)}\n", "plugin build", f"The whole log: {log}")
        staged.mkdir()
        for library in (LIBRARY, REGISTER):
            shutil.copy2(work / library, staged / library)
        record = BuildRecord(
            source_hash=wanted.source_hash,
            tensorrt=wanted.headers.text,
            architectures=wanted.architectures,
            nvcc=compiler,
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )
        (staged / _RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        if wanted.folder.exists():  # a folder without its library
            shutil.rmtree(wanted.folder)
        staged.rename(wanted.folder)
    log.unlink()


def _run(command: list[str], output: IO[str], environment: dict[str, str]) -> int:
    """The exit status; an interrupted build takes its compilers with it."""
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _errors(log: Path, most: int = 12) -> str:
    """The lines of a build log that name errors, or its last ones."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|fatal", line, re.I)]
    return "\n".join((errors or lines)[:most] if errors else lines[-most:])
