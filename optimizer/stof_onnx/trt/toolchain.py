"""Finds what the plugin library is built with: nvcc, CMake, TensorRT's headers. Looks, but installs nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stof_onnx.errors import StofError

Version = tuple[int, int, int]

# The wheels have to agree in their version: an older ptxas does not read what a newer cicc writes.
_WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
_INSTALL_NVCC = (
    "Install the CUDA toolkit (12.0 or newer) and put nvcc on PATH or set CUDA_HOME, or: pip install "
    + " ".join(f"'{name}==13.0.*'" for name in _WHEELS)
)
_INSTALL_CMAKE = "pip install cmake ninja"
_INSTALL_HEADERS = (
    "Set TENSORRT_INCLUDE_DIR (or give `stof-onnx plugin build --include`) to the folder that holds NvInfer.h: it is "
    "in TensorRT's tar archive, in the package libnvinfer-headers-dev, and in the include folder of "
    "github.com/NVIDIA/TensorRT at the tag of your version; the Python wheels of TensorRT have no headers"
)
# Parts of a toolkit that come in a wheel of their own.
_PARTS = {
    "nvvm/bin/cicc": "nvidia-nvvm",
    "include/crt": "nvidia-cuda-crt",
    "include/cuda_runtime_api.h": "nvidia-cuda-runtime",
    "lib/libcudart_static.a": "nvidia-cuda-runtime",
    "include/cccl/nv/target": "nvidia-cuda-cccl",
}
_USUAL_NVCC = Path("/usr/local/cuda/bin/nvcc")
_OLDEST_CMAKE = (3, 24)
_OLDEST_NVCC = (12, 0)


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler. `wheel_root` is the toolkit's folder where it comes from PyPI wheels."""

    path: Path
    version: tuple[int, int]
    wheel_root: Path | None = None


@dataclass(frozen=True)
class Headers:
    """TensorRT's headers: the folder that holds NvInfer.h, and their version."""

    folder: Path
    version: Version

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


def parse_version(text: str) -> Version:
    """`"8.6.0.12"` or `"10.14"` as three numbers.

    Raises:
        StofError: not a version.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if not match:
        raise StofError(f"'{text}' is not a version of TensorRT", "TensorRT", "Write it as 8.6.0 or 10.14.1")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def installed_tensorrt() -> str | None:
    """The version of the TensorRT that Python would import, or None. Imports nothing."""
    for name in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11", "tensorrt-libs"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def same_adapter(a: Version, b: Version) -> bool:
    """Whether one plugin library serves both versions: IPluginV3 from TensorRT 10 on, IPluginV2DynamicExt before."""
    return (a[0] >= 10) == (b[0] >= 10)


def find_headers(wanted: Version | None = None, folder: Path | None = None) -> Headers:
    """TensorRT's headers that fit version `wanted` (any when None), the closest version first.

    Args:
        wanted: the TensorRT that shall load the plugin library.
        folder: where to look instead of searching; TENSORRT_INCLUDE_DIR by default.

    Raises:
        StofError: none found, or those in `folder` are for another adapter.
    """
    chosen = folder or (Path(os.environ["TENSORRT_INCLUDE_DIR"]) if os.environ.get("TENSORRT_INCLUDE_DIR") else None)
    if chosen:
        headers = _read_headers(chosen)
        if headers is None:
            raise StofError("no NvInfer.h and NvInferVersion.h in it", str(chosen), _INSTALL_HEADERS)
        if wanted and not same_adapter(headers.version, wanted):
            asked = ".".join(map(str, wanted))
            raise StofError(f"headers of TensorRT {headers.text}, but {asked} shall load the plugins", str(chosen))
        return headers
    found = [h for h in map(_read_headers, _header_folders()) if h]
    fitting = [h for h in found if wanted is None or same_adapter(h.version, wanted)]
    if not fitting:
        asked = "" if wanted is None else f" {'.'.join(map(str, wanted))}"
        others = "".join(f"; found {h.text} in {h.folder}" for h in found)
        raise StofError(f"no headers of TensorRT{asked}{others}", "plugin build", _INSTALL_HEADERS)
    if wanted is None:
        return fitting[0]
    return min(fitting, key=lambda h: [abs(x - y) for x, y in zip(h.version, wanted, strict=True)])


def find_nvcc() -> Nvcc:
    """nvcc from CUDACXX, CUDA_HOME, PATH, the usual places or PyPI wheels, in this order.

    Raises:
        StofError: none, too old, or wheels that miss parts or do not fit together.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    for path in (
        Path(os.environ["CUDACXX"]) if os.environ.get("CUDACXX") else None,
        Path(home) / "bin" / "nvcc" if home else None,
        Path(on_path) if on_path else None,
        _USUAL_NVCC,
    ):
        if path and path.is_file():
            return _checked_nvcc(path, None)
    for root in _wheel_roots():
        if (root / "bin" / "nvcc").is_file():
            _check_wheels(root)
            return _checked_nvcc(root / "bin" / "nvcc", root)
    raise StofError("no CUDA compiler (nvcc)", "plugin build", _INSTALL_NVCC)


def find_cmake() -> Path:
    """CMake on PATH or beside the Python interpreter.

    Raises:
        StofError: none, or too old.
    """
    path = _program("cmake")
    if path is None:
        raise StofError("no CMake", "plugin build", _INSTALL_CMAKE)
    version = _version_of(path, r"version (\d+)\.(\d+)")
    if version < _OLDEST_CMAKE:
        raise StofError("CMake is older than 3.24", str(path), _INSTALL_CMAKE)
    return path


def find_generator() -> tuple[str, Path]:
    """CMake's generator and the program behind it.

    Raises:
        StofError: neither Ninja nor make.
    """
    for generator, program in (("Ninja", "ninja"), ("Unix Makefiles", "make")):
        path = _program(program)
        if path:
            return generator, path
    raise StofError("neither ninja nor make", "plugin build", _INSTALL_CMAKE)


def find_cxx() -> Path:
    """The host's C++ compiler: CXX or g++.

    Raises:
        StofError: none.
    """
    path = shutil.which(os.environ.get("CXX") or "g++")
    if path is None:
        raise StofError("no C++ compiler", "plugin build", "Install g++, or set CXX")
    return Path(path)


def _program(name: str) -> Path | None:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    return Path(found) if found else None


def _version_of(program: Path, pattern: str) -> tuple[int, int]:
    try:
        run = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StofError(f"does not run ({error})", str(program)) from error
    match = re.search(pattern, run.stdout)
    if not match:
        raise StofError(f"does not say its version: {(run.stderr or run.stdout).strip()[-200:]}", str(program))
    return int(match[1]), int(match[2])


def _checked_nvcc(path: Path, wheel_root: Path | None) -> Nvcc:
    version = _version_of(path, r"release (\d+)\.(\d+)")
    if version < _OLDEST_NVCC:
        raise StofError(f"nvcc {version[0]}.{version[1]} is older than 12.0", str(path), _INSTALL_NVCC)
    return Nvcc(path, version, wheel_root)


def _wheel_roots() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(place).glob("cu[0-9]*"), reverse=True)


def _check_wheels(root: Path) -> None:
    missing = sorted({wheel for part, wheel in _PARTS.items() if not (root / part).exists()})
    if missing:
        raise StofError(f"the CUDA wheels miss {', '.join(missing)}", str(root), _INSTALL_NVCC)
    versions = {}
    for name in _WHEELS:
        try:
            versions[name] = ".".join(importlib.metadata.version(name).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue
    compilers = {n: v for n, v in versions.items() if n in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")}
    if len(set(compilers.values())) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in compilers.items())
        raise StofError(f"the CUDA wheels are of different versions ({listed})", str(root), _INSTALL_NVCC)


def _header_folders() -> Iterator[Path]:
    for variable in ("TENSORRT_ROOT", "TENSORRT_HOME", "TRT_ROOT"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    for library in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        yield Path(library).parent / "include"
    yield from (Path("/usr/include") / f"{os.uname().machine}-linux-gnu", Path("/usr/include"))
    for prefix in ("/usr/local", "/usr/local/tensorrt", "/usr/local/TensorRT", "/opt/tensorrt", "/opt/TensorRT"):
        yield Path(prefix) / "include"
    spec = importlib.util.find_spec("kernel_lens")
    for place in (spec.submodule_search_locations or []) if spec else []:
        yield Path(place) / "include" / "tensorrt"


def _read_headers(folder: Path) -> Headers | None:
    file = folder / "NvInferVersion.h"
    if not file.is_file() or not (folder / "NvInfer.h").is_file():
        return None
    text = file.read_text(errors="replace")
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        match = re.search(rf"^#define (?:NV_TENSORRT_{part}|TRT_{part}_ENTERPRISE)[ \t]+(\d+)", text, re.M)
        if not match:
            return None
        numbers.append(int(match[1]))
    return Headers(folder, (numbers[0], numbers[1], numbers[2]))
