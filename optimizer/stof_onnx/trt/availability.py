"""TensorRT and a GPU, where there are any. Nothing here is imported before an engine is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from stof_onnx.errors import StofError
from stof_onnx.kernels.select import Device


def tensorrt() -> Any:
    """The tensorrt module.

    Raises:
        StofError: it is not installed, or it is TensorRT-RTX, which has no plugins.
    """
    try:
        module = import_module("tensorrt")
        module.Builder  # noqa: B018  (the placeholder package of PyPI has none)
    except (ImportError, AttributeError, OSError) as error:
        if _has("tensorrt_rtx"):
            raise StofError("TensorRT-RTX takes no plugins", "tensorrt", "Use TensorRT 8.6 to 11") from error
        advice = "Install tensorrt (8.6 or newer)"
        raise StofError(f"TensorRT is not usable here ({error})", "tensorrt", advice) from error
    return module


def version() -> tuple[int, ...]:
    """TensorRT's version as numbers."""
    return tuple(int(part) for part in str(tensorrt().__version__).split(".")[:3] if part.isdigit())


def device() -> Device:
    """The first GPU.

    Raises:
        StofError: there is none, or cuda-bindings is missing.
    """
    from stof_onnx.trt import cuda

    return Device(*cuda.capability(), name=cuda.name())


def why_no_engine() -> str:
    """One line on what is missing for building an engine; empty when nothing is."""
    try:
        tensorrt()
        device()
    except StofError as error:
        return str(error)
    return ""


def load_plugins(library: Path) -> None:
    """Registers the plugin library with TensorRT (once a process).

    Raises:
        StofError: it does not load.
    """
    path = str(library.resolve())
    if path in _loaded:
        return
    registry = tensorrt().get_plugin_registry()
    try:
        handle = registry.load_library(path)
    except Exception as error:  # pybind raises what TensorRT's C++ throws
        raise StofError(f"the plugin library does not load ({error})", path) from error
    names = {(c.name, c.plugin_namespace) for c in _creators(registry)}
    if ("StofAttention", "stof") not in names:
        raise StofError("the plugin library registers no StofAttention", path, "It was built for another TensorRT")
    if handle is None and _loaded:  # the first one's creators stay
        advice = "Load engines with plugins of another build in another process, or embed the plugins"
        raise StofError(f"another plugin library is loaded in this process: {', '.join(_loaded)}", path, advice)
    _loaded.add(path)


_loaded: set[str] = set()


def _creators(registry: Any) -> list[Any]:
    listed = registry.all_creators if hasattr(registry, "all_creators") else registry.plugin_creator_list
    return [creator for creator in listed if hasattr(creator, "plugin_namespace")]


def _has(module: str) -> bool:
    try:
        import_module(module)
    except Exception:  # whatever it raises, it can not be used
        return False
    return True
