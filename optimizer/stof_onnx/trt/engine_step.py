"""The engine part of `optimize`, and `verify` and `bench` of engines: what the pipeline calls."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from stof_onnx.errors import StofError
from stof_onnx.files import check_source
from stof_onnx.graph.model import LoadedModel
from stof_onnx.graph.read import read_proto
from stof_onnx.kernels.select import Device
from stof_onnx.options import DimRange, EngineWishes, OptimizeOptions
from stof_onnx.trt import availability, plugin_build
from stof_onnx.trt.build import BuildOptions, Profile
from stof_onnx.trt.choose import EngineResult, lower_options, make_engine, profile_of
from stof_onnx.trt.compare import EngineError, measure, passes, worst
from stof_onnx.trt.lower import EMITTED_DOMAIN, Lowered, lower_file, save_lowered
from stof_onnx.trt.manifest import check_gpu, plugin_library_of, precision_of, read_manifest
from stof_onnx.trt.session import EngineSession
from stof_onnx.verify.loaded import loaded_outputs, loaded_samples
from stof_onnx.verify.roles import InputRole, input_roles
from stof_onnx.verify.samples import make_samples
from stof_onnx.verify.session import Runner

ENGINE_SUFFIX = ".engine"
_ENGINE_SUFFIXES = (ENGINE_SUFFIX, ".plan", ".trt")


def is_engine(path: Path) -> bool:
    """Whether a file is called what engines are called."""
    return path.suffix in _ENGINE_SUFFIXES


def find_plugin_library() -> Path:
    """The plugin library for the installed TensorRT, built if need be.

    Raises:
        StofError: there is none and none can be built.
    """
    return plugin_build.plugin_library(".".join(map(str, availability.version())))


def check_bounds(model: LoadedModel) -> None:
    """Refuses, before any work is done, a model for which TensorRT can have no profile.

    Raises:
        StofError: an axis of an input that nothing bounds.
    """
    _profile(model, input_roles(model.proto, ()))


def build_engines(model: LoadedModel, portable: Path, target: Path, wanted: OptimizeOptions) -> EngineResult:
    """Builds and keeps the faster engine of `model` (as loaded) and its optimized file.

    Both engines are checked on `load_inputs`, else on random inputs at the sizes to tune for; against `load_outputs`,
    else ONNX Runtime, else (without verification) the plain engine.

    Raises:
        StofError: whatever stands in the way of an engine.
    """
    roles, wishes = input_roles(model.proto, ()), wanted.engine
    options = BuildOptions(
        precision=wishes.precision,
        profile=_profile(model, roles),
        plugins=find_plugin_library(),
        embed=wishes.embed,
        workspace=wishes.workspace,
        timing_cache=wishes.timing_cache,
        level=wishes.level,
        half_io=wishes.half_io,
    )
    if wanted.load_inputs is not None:
        feeds = [sample.feeds for sample in loaded_samples(wanted.load_inputs, model.proto)]
    else:
        feeds = opt_feeds(roles, options.profile, wanted.seed)
    expected = _expected(model.proto, model.base_dir, feeds, wanted)
    return make_engine(model.path, portable, target, options, feeds, expected, wishes.keep)


def _expected(
    proto: onnx.ModelProto, base_dir: Path, feeds: Sequence[dict[str, np.ndarray]], wanted: OptimizeOptions
) -> list[dict[str, np.ndarray]]:
    """Outputs of the model on each of `feeds`; none where nothing is to be verified."""
    if wanted.load_outputs is not None:
        return loaded_outputs(wanted.load_outputs, [o.name for o in proto.graph.output], len(feeds))
    if not wanted.verify:
        return []
    runner = Runner(proto, base_dir)
    return [runner.run(one) for one in feeds]


def emit_lowered(model: LoadedModel, portable: Path, target: Path, wishes: EngineWishes) -> Lowered:
    """Writes the lowered model for trtexec, polygraphy and ONNX Runtime's TensorRT provider. Needs no GPU.

    Raises:
        StofError: an axis that nothing bounds, or a file that can not be written.
    """
    device = Device(wishes.arch) if wishes.arch else _device_or_default()
    options = lower_options(wishes.precision, _profile(model, input_roles(model.proto, ())), device)
    lowered = lower_file(portable, replace(options, domain=EMITTED_DOMAIN))
    save_lowered(lowered.model, target)
    return lowered


def check_portable(proto: onnx.ModelProto, path: Path) -> None:
    """Refuses what `emit_lowered` writes where ONNX Runtime is to run it.

    Raises:
        StofError: see above.
    """
    if any(node.domain == EMITTED_DOMAIN for node in proto.graph.node):
        advice = "Compare the file that it was lowered from, or an engine"
        raise StofError("holds TensorRT plugin nodes, which ONNX Runtime does not run", str(path), advice)


def _profile(model: LoadedModel, roles: Sequence[InputRole]) -> Profile:
    return profile_of({role.name: role.dims for role in roles}, model.input_ranges)


def _device_or_default() -> Device:
    try:
        return availability.device()
    except StofError:
        return Device()


def opt_feeds(
    roles: Sequence[InputRole], profile: Mapping[str, tuple[DimRange, ...]], seed: int | None
) -> list[dict[str, np.ndarray]]:
    """Random input sets at the sizes to tune for: one, and a padded one where the model has padding."""
    fixed = {n: tuple(DimRange(d.opt, d.opt, d.opt) for d in dims) for n, dims in profile.items()}
    rng = np.random.default_rng(secrets.randbits(32) if seed is None else seed)
    return [sample.feeds for sample in make_samples(roles, fixed, 1, None, rng)[:2]]


@dataclass(frozen=True)
class EngineCheck:
    """The comparison of an engine with its model on ONNX Runtime."""

    engine: Path
    error: EngineError
    precision: str
    passed: bool

    def to_json(self) -> dict[str, object]:
        """For the report."""
        return {"engine": str(self.engine), **asdict(self.error), "precision": self.precision, "passed": self.passed}


def load_engine(engine: Path) -> EngineSession:
    """A session of the engine file, with the plugin library that its manifest names.

    Raises:
        StofError: TensorRT or a GPU is missing, the engine is for another GPU, or it does not load.
    """
    check_source(engine)
    if reason := availability.why_no_engine():
        raise StofError(reason, str(engine))
    check_gpu(engine, availability.device().arch)
    return EngineSession(engine, plugin_library_of(engine))


def verify_engine(model: Path, engine: Path, wanted: OptimizeOptions) -> EngineCheck:
    """Runs both on the same inputs: random ones at the sizes the engine was tuned for, or `load_inputs`.

    With `load_outputs` the engine alone is run.

    Raises:
        StofError: one of them can not be run.
    """
    proto = read_proto(model)
    session = load_engine(engine)
    if wanted.load_inputs is not None:
        feeds = [sample.feeds for sample in loaded_samples(wanted.load_inputs, proto)]
    else:
        fixed = {n: tuple(DimRange(d, d, d) for d in shape) for n, shape in session.opt_shapes().items()}
        feeds = opt_feeds(input_roles(proto, ()), fixed, wanted.seed)
    expected = _expected(proto, model.parent, feeds, wanted)
    error = worst(measure(session.run(one), want) for one, want in zip(feeds, expected, strict=True))
    manifest = read_manifest(engine)
    precision = precision_of(manifest)
    return EngineCheck(engine, error, precision, passes(error, _plain_error(manifest), precision))


def _plain_error(manifest: Mapping[str, Any]) -> EngineError | None:
    """What the plain engine was measured to be off by; None where the manifest does not say."""
    found: Any = manifest
    for key in ("measured", "plain", "error"):
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or found.keys() != {field.name for field in fields(EngineError)}:
        return None
    return EngineError(**found) if all(type(value) in (int, float) for value in found.values()) else None
