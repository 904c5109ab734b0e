"""Builds a serialized TensorRT engine from an ONNX file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stof_onnx import signals
from stof_onnx.errors import StofError
from stof_onnx.files import read_source, write_bytes
from stof_onnx.options import DimRange
from stof_onnx.trt.availability import load_plugins, tensorrt, version

PRECISIONS = ("fp16", "bf16", "fp32")
TACTICS = "STOF_TRT_TACTICS"  # comma-separated tactic sources, e.g. for machines without cuBLAS and cuDNN

Profile = Mapping[str, tuple[DimRange, ...]]


@dataclass(frozen=True)
class BuildOptions:
    """How to build.

    Attributes:
        precision: "fp16" or "bf16" let TensorRT use it beside float32; "fp32" does not.
        profile: the sizes of each graph input.
        plugins: the plugin library that the model needs, or None.
        embed: put the library into the engine (TensorRT makes it version-compatible then).
        workspace: bytes a layer may use, None for TensorRT's own limit.
        timing_cache: file to read measured tactics from and to add new ones to; None shares them within the process.
        level: TensorRT's builder optimization level (0 builds fastest, 3 is its default), None for the default.
        detailed: keep layer details for the inspector.
        half_io: float32 inputs and outputs become float16 (precision "fp16" only).
    """

    precision: str = "fp16"
    profile: Profile = field(default_factory=dict)
    plugins: Path | None = None
    embed: bool = True
    workspace: int | None = None
    timing_cache: Path | None = None
    level: int | None = None
    detailed: bool = False
    half_io: bool = False


@dataclass(frozen=True)
class BuiltEngine:
    """A serialized engine and the seconds it took."""

    data: bytes
    seconds: float


class _Log:
    """TensorRT's messages: errors are kept for the message users get; STOF_DEBUG=1 shows warnings, 2 everything."""

    @staticmethod
    def make() -> Any:
        trt = tensorrt()

        class Logger(trt.ILogger):  # type: ignore[name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.errors: list[str] = []

            def log(self, severity: Any, message: str) -> None:
                if severity <= trt.ILogger.Severity.ERROR:
                    self.errors.append(message)
                shown = {"1": trt.ILogger.Severity.WARNING, "2": trt.ILogger.Severity.VERBOSE}
                least = shown.get(os.environ.get("STOF_DEBUG", ""))
                if least is not None and severity <= least:
                    print(f"[TensorRT] {message}", flush=True)

        return Logger()


_logger: Any = None


def logger() -> Any:
    """The one logger of this process (TensorRT keeps the first it gets)."""
    global _logger
    if _logger is None:
        _logger = _Log.make()
    return _logger


def build_engine(model: Path, options: BuildOptions) -> BuiltEngine:
    """Parses the ONNX file and builds. Ctrl-C is heard when the engine is built.

    Raises:
        StofError: TensorRT can not parse the model, or builds no engine from it.
    """
    with signals.after():
        return _build(model, options)


def _build(model: Path, options: BuildOptions) -> BuiltEngine:
    trt, log = tensorrt(), logger()
    log.errors.clear()
    if options.plugins is not None:
        load_plugins(options.plugins)
    start = time.perf_counter()
    builder = trt.Builder(log)
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(model)):
        reasons = [str(parser.get_error(i).desc()) for i in range(parser.num_errors)]
        problems = "; ".join(reasons + _plugins_words(log))
        raise StofError(f"TensorRT {trt.__version__} can not parse it: {problems}", str(model))
    if options.half_io:
        _narrow_ends(trt, network, options.precision)
    config = builder.create_builder_config()
    _configure(trt, builder, network, config, options)
    cache = _load_cache(config, options.timing_cache)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise StofError("TensorRT built no engine: " + ("; ".join(log.errors[-3:]) or "no reason given"), str(model))
    _save_cache(cache, options.timing_cache)
    return BuiltEngine(bytes(serialized), time.perf_counter() - start)


def _plugins_words(log: Any) -> list[str]:
    """What our plugins said: the parser itself only knows that a plugin was not created."""
    return [message for message in log.errors if message.startswith("Stof")]


def tactic_sources() -> str:
    """What STOF_TRT_TACTICS restricts TensorRT to, for results; "default" where it is unset."""
    return os.environ.get(TACTICS, "") or "default"


def _network_flags(trt: Any) -> int:
    explicit = getattr(trt.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH", None)
    return 0 if explicit is None or version() >= (10,) else 1 << int(explicit)


def _narrow_ends(trt: Any, network: Any, precision: str) -> None:
    """Makes the network's float32 inputs and outputs float16, as trtexec's --inputIOFormats=fp16:chw does."""
    if precision != "fp16":
        raise StofError(f"an engine of {precision} keeps its inputs and outputs", "--half-io", "Leave it out")
    ends = [network.get_input(i) for i in range(network.num_inputs)]
    ends += [network.get_output(i) for i in range(network.num_outputs)]
    for tensor in ends:
        if tensor.dtype == trt.float32:
            tensor.dtype = trt.float16


def _configure(trt: Any, builder: Any, network: Any, config: Any, options: BuildOptions) -> None:
    flag = {"fp16": "FP16", "bf16": "BF16", "fp32": ""}[options.precision]
    if flag:
        if not hasattr(trt.BuilderFlag, flag):
            raise StofError(
                f"TensorRT {trt.__version__} has no {options.precision} builder flag",
                "--precision",
                "Export the model in that precision and build with --precision fp32",
            )
        config.set_flag(getattr(trt.BuilderFlag, flag))
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    if options.level is not None:
        config.builder_optimization_level = options.level
    names = [name for name in os.environ.get(TACTICS, "").split(",") if name]
    if names:
        config.set_tactic_sources(sum(1 << int(getattr(trt.TacticSource, name)) for name in names))
    if options.plugins is not None and options.embed:
        config.plugins_to_serialize = [str(options.plugins.resolve())]
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    sharing = getattr(getattr(trt, "PreviewFeature", None), "PROFILE_SHARING_0806", None)
    if sharing is not None and version() < (10,):  # several contexts at once on the one profile: default since 10
        config.set_preview_feature(sharing, True)
    if options.detailed:
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    _add_profile(builder, network, config, options.profile)


def _add_profile(builder: Any, network: Any, config: Any, sizes: Profile) -> None:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    dynamic = [tensor for tensor in inputs if any(size < 0 for size in tensor.shape)]
    if not dynamic:
        return
    profile = builder.create_optimization_profile()
    for tensor in dynamic:
        if tensor.name not in sizes:
            advice = f"Give --shape {tensor.name}:MIN:OPT:MAX"
            raise StofError(f"the sizes of the dynamic input '{tensor.name}' are not known", "engine", advice)
        dims = sizes[tensor.name]
        profile.set_shape(tensor.name, *(tuple(getattr(d, end) for d in dims) for end in ("min", "opt", "max")))
    config.add_optimization_profile(profile)


_measured = b""  # tactics of earlier builds of this process, where no file keeps them


def _load_cache(config: Any, path: Path | None) -> Any:
    """Tactics that were measured before, in the file or by this process: its builds share most of their layers."""
    known = _measured if path is None else read_source(path) if path.exists() else b""
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        where = "engine" if path is None else str(path)
        raise StofError("the timing cache is of another TensorRT or GPU", where, "Give another --timing-cache")
    return cache


def _save_cache(cache: Any, path: Path | None) -> None:
    global _measured
    data = bytes(cache.serialize())
    if path is None:
        _measured = data
    else:
        write_bytes(path, data)
