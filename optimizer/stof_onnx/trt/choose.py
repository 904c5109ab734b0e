"""Builds the plain and the stof engine, checks both, times both, and keeps the faster one that is right."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stof_onnx.errors import StofError
from stof_onnx.kernels.select import Device
from stof_onnx.options import DimRange
from stof_onnx.trt import availability, cuda, turns
from stof_onnx.trt.build import BuildOptions, BuiltEngine, Profile, build_engine, tactic_sources
from stof_onnx.trt.compare import EngineError, measure, passes, worst
from stof_onnx.trt.lower import Lowered, LowerOptions, lower_file, save_lowered
from stof_onnx.trt.manifest import digest, write_manifest
from stof_onnx.trt.plugin_nodes import SiteLowering
from stof_onnx.trt.session import EngineSession, Timing

_log = logging.getLogger(__name__)
_NEVER_SLOWER = 1.0  # the stof engine is kept when its median is at most this times the plain one's
Reference = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


@dataclass
class Candidate:
    """One engine: built, checked, timed. `problem` says why it is out of the race."""

    kind: str  # "plain" or "stof"
    engine: BuiltEngine | None = None
    error: EngineError | None = None
    timing: Timing | None = None
    memory: int = 0
    problem: str = ""
    outputs: list[dict[str, np.ndarray]] = field(default_factory=list)  # of each input set

    def to_json(self) -> dict[str, Any]:
        return {
            "ms": None if self.timing is None else round(self.timing.median, 5),
            "p90_ms": None if self.timing is None else round(self.timing.p90, 5),
            "p99_ms": None if self.timing is None else round(self.timing.p99, 5),
            "cuda_graph": None if self.timing is None else self.timing.graph,
            "error": None if self.error is None else asdict(self.error),
            "engine_bytes": None if self.engine is None else len(self.engine.data),
            "build_s": None if self.engine is None else round(self.engine.seconds, 2),
            "memory_mb": round(self.memory / 2**20, 1),
            "problem": self.problem,
        }


@dataclass
class EngineResult:
    """What was built and kept: `kept` is "stof" or "plain"."""

    path: Path
    kept: str
    plain: Candidate
    stof: Candidate
    sites: list[SiteLowering] = field(default_factory=list)
    packed: int = 0
    flattened: int = 0

    @property
    def speedup(self) -> float | None:
        if self.plain.timing is None or self.stof.timing is None:
            return None
        return self.plain.timing.median / self.stof.timing.median

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "kept": self.kept,
            "plain": self.plain.to_json(),
            "stof": self.stof.to_json(),
            "packed": self.packed,
            "flattened": self.flattened,
            "sites": [asdict(site) for site in self.sites],
        }


def make_engine(
    source: Path,
    portable: Path,
    target: Path,
    options: BuildOptions,
    feeds: Sequence[dict[str, np.ndarray]],
    reference: Reference | None,
    keep: str = "faster",
) -> EngineResult:
    """Writes the better engine to `target` and its manifest beside it.

    Args:
        source, portable: the original model and the optimized one.
        options: `plugins` names the library; its profile bounds every dynamic input.
        feeds: input sets at the sizes to tune for: both engines are checked on all and timed on the first.
        keep: "faster", or "stof" or "plain" whatever the times are.
        reference: computes the original's outputs; None takes the plain engine's (--no-verify).

    Raises:
        StofError: neither engine can be built, or neither is right.
    """
    plain, stof, lowered = race(source, portable, options, feeds, reference)
    kept = {"plain": plain, "stof": stof}.get(keep) or faster(plain, stof)
    if kept.engine is None or kept.problem:
        raise StofError(f"no engine: plain: {plain.problem or 'fine'}; stof: {stof.problem or 'fine'}", str(source))
    _write(target, kept.engine.data)
    result = EngineResult(target, kept.kind, plain, stof, lowered.sites, lowered.packed, lowered.flattened)
    write_manifest(target.with_suffix(".json"), _manifest(result, options))
    return result


def race(
    source: Path,
    portable: Path,
    options: BuildOptions,
    feeds: Sequence[dict[str, np.ndarray]],
    reference: Reference | None,
    plain: Candidate | None = None,
) -> tuple[Candidate, Candidate, Lowered]:
    """Builds, checks and times both engines, as `make_engine` describes it; writes nothing.

    Args:
        plain: a candidate built before, in place of a new one.
    """
    lowered = lower_file(portable, lower_options(options.precision, options.profile, availability.device()))
    expected = [reference(one) for one in feeds] if reference is not None else []
    stof, earlier = Candidate("stof"), plain
    plain = earlier or Candidate("plain")
    if not lowered.plugins:
        stof.problem = "no attention was lowered"
    with turns.building(), tempfile.TemporaryDirectory() as folder:
        if earlier is None:
            _build(plain, source, replace(options, plugins=None))
        if lowered.plugins:
            path = Path(folder) / "lowered.onnx"
            save_lowered(lowered.model, path)
            _build(stof, path, options)
    with turns.alone():
        for candidate in [stof] if earlier else [plain, stof]:
            _run(candidate, feeds)
    _judge(plain, stof, expected, options.precision)
    return plain, stof, lowered


def lower_options(precision: str, profile: Profile, device: Device) -> LowerOptions:
    """Lowering for an engine of this profile."""
    opt, largest = ({n: tuple(getattr(d, end) for d in dims) for n, dims in profile.items()} for end in ("opt", "max"))
    return LowerOptions(precision, device, opt, largest)


def _build(candidate: Candidate, model: Path, options: BuildOptions) -> None:
    """Builds; a failure is noted, since the other engine may still serve."""
    try:
        candidate.engine = build_engine(model, options)
        _log.info("%s engine built in %.1f s", candidate.kind, candidate.engine.seconds)
    except StofError as error:
        candidate.problem = str(error)


def _run(candidate: Candidate, feeds: Sequence[dict[str, np.ndarray]]) -> None:
    """Runs and times what was built."""
    if candidate.engine is None:
        return
    try:
        session = EngineSession(candidate.engine.data)
        try:
            candidate.memory = session.memory
            candidate.outputs = [session.run(one) for one in feeds]
            candidate.timing = session.time(feeds[0])
            _log.info("%s engine: %.4f ms", candidate.kind, candidate.timing.median)
        finally:
            session.close()
    except StofError as error:
        candidate.problem = str(error)


def _judge(plain: Candidate, stof: Candidate, expected: list[dict[str, np.ndarray]], precision: str) -> None:
    """Notes both errors, and puts out of the race what is wrong."""
    expected = expected or plain.outputs
    for candidate in (plain, stof):
        if candidate.outputs and expected:
            candidate.error = worst(map(measure, candidate.outputs, expected))
        candidate.outputs = []
    if stof.error is not None and not passes(stof.error, plain.error, precision):
        stof.problem = f"wrong outputs: relative error {stof.error.relative:.2e}"


def faster(plain: Candidate, stof: Candidate) -> Candidate:
    """The stof engine where it is right and not slower, else the plain one."""
    if stof.problem or stof.timing is None:
        return plain
    if plain.timing is None or stof.timing.median <= _NEVER_SLOWER * plain.timing.median:
        return stof
    return plain


def _write(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StofError(f"can not be written ({error.strerror})", str(target), "Choose another place") from error


def _manifest(result: EngineResult, options: BuildOptions) -> dict[str, Any]:
    plugins = None
    if result.kept == "stof" and options.plugins is not None:
        path = options.plugins.resolve()
        plugins = {"path": str(path), "sha256": digest(path), "embedded": options.embed}
    return {
        "engine": result.path.name,
        "kept": result.kept,
        "tensorrt": availability.tensorrt().__version__,
        "gpu": cuda.name(),
        "arch": availability.device().arch,
        "precision": options.precision,
        "tactic_sources": tactic_sources(),
        "plugin_library": plugins,
        "inputs": {name: [asdict(d) for d in dims] for name, dims in options.profile.items()},
        "measured": result.to_json(),
    }


def profile_of(dims: Mapping[str, tuple[Any, ...]], ranges: Mapping[str, tuple[Any, ...]]) -> Profile:
    """The sizes of every input: fixed ones from the model, the others from `ranges`.

    Raises:
        StofError: an axis that nothing bounds.
    """
    profile = {}
    for name, shape in dims.items():
        known = ranges.get(name, ())
        sizes = []
        for axis, size in enumerate(shape):
            bound = known[axis] if axis < len(known) else None
            if isinstance(size, int) and size > 0:
                bound = DimRange(size, size, size)
            if bound is None:
                advice = f"Give --shape {name}:MIN:OPT:MAX"
                raise StofError(f"axis {axis} of the input '{name}' has no bounds", "engine", advice)
            sizes.append(bound)
        profile[name] = tuple(sizes)
    return profile
