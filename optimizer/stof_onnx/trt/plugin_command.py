"""`stof-onnx plugin build | path | info`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from stof_onnx.errors import StofError
from stof_onnx.trt import plugin_build, toolchain


def build(
    version: str | None, include_dir: Path | None, architectures: str, console: Console, progress: Console
) -> None:
    """Builds the library unless it is there, and prints its path."""
    library = plugin_build.plugin_library(
        version,
        include_dir=include_dir,
        architectures=architectures,
        say=lambda text: progress.print(text, highlight=False, markup=False, soft_wrap=True),
    )
    _line(console, str(library))


def path(version: str | None, include_dir: Path | None, architectures: str, console: Console) -> None:
    """Prints the path of the library that is there.

    Raises:
        StofError: it is not built.
    """
    library = plugin_build.library_path(version, include_dir, architectures)
    if not library.is_file():
        raise StofError("the plugins are not built", str(library), "Run `stof-onnx plugin build` with the same options")
    _line(console, str(library))


def info(version: str | None, include_dir: Path | None, architectures: str, console: Console) -> None:
    """Prints the library, what it was built from, and every tool that a build would use or misses."""
    _line(console, f"TensorRT in Python: {toolchain.installed_tensorrt() or 'none'}")
    _tool(console, "headers", lambda: _headers(version, include_dir))
    _tool(console, "nvcc", lambda: "{0.path} {0.version[0]}.{0.version[1]}".format(toolchain.find_nvcc()))
    _tool(console, "cmake", lambda: str(toolchain.find_cmake()))
    _tool(console, "generator", lambda: str(toolchain.find_generator()[1]))
    _tool(console, "C++ compiler", lambda: str(toolchain.find_cxx()))
    _tool(console, "library", lambda: _library(version, include_dir, architectures))


def _headers(version: str | None, include_dir: Path | None) -> str:
    wanted = version or toolchain.installed_tensorrt()
    headers = toolchain.find_headers(toolchain.parse_version(wanted) if wanted else None, include_dir)
    return f"{headers.folder} {headers.text}"


def _library(version: str | None, include_dir: Path | None, architectures: str) -> str:
    library = plugin_build.library_path(version, include_dir, architectures)
    if not library.is_file():
        return f"{library} (not built)"
    record = plugin_build.build_record(library)
    if record is None:
        return f"{library} (STOF_PLUGIN_LIBRARY)"
    return f"{library} (sm {record.architectures}, TensorRT {record.tensorrt}, nvcc {record.nvcc}, {record.date})"


def _tool(console: Console, name: str, find: Callable[[], str]) -> None:
    try:
        _line(console, f"{name}: {find()}")
    except StofError as error:
        _line(console, f"{name}: missing: {error}")


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
