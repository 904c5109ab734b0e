"""Builds the plain and the stof engine, checks both, times both, and keeps the faster one that is right."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from stof_onnx.errors import StofError
from stof_onnx.files import write_bytes
from stof_onnx.kernels.select import Device
from stof_onnx.options import DimRange
from stof_onnx.trt import availability, cuda, turns
from stof_onnx.trt.build import BuildOptions, BuiltEngine, Profile, build_engine, tactic_sources
from stof_onnx.trt.compare import EngineError, measure, passes, worst
from stof_onnx.trt.lower import Lowered, LowerOptions, lower_file, save_lowered
from stof_onnx.trt.manifest import digest, manifest_of, write_manifest
from stof_onnx.trt.mix import sites_to_leave
from stof_onnx.trt.session import EngineSession, Timing

_log = logging.getLogger(__name__)


@dataclass
class Candidate:
    """One engine: built, checked, timed. `problem` says why it is out of the race."""

    kind: str  # "plain"; "stof"; "mixed": some attentions left to TensorRT; "fused": with fused regions
    engine: BuiltEngine | None = None
    error: EngineError | None = None
    timing: Timing | None = None
    memory: int = 0
    load_seconds: float = 0.0  # embedded plugins are unpacked and opened then
    problem: str = ""
    outputs: list[dict[str, np.ndarray]] = field(default_factory=list)  # of each input set
    layers: dict[str, float] = field(default_factory=dict)  # microseconds
    lowered: Lowered | None = None

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
            "load_s": round(self.load_seconds, 3),
            "layers_us": {name[:200]: round(us, 1) for name, us in self.longest_layers() if us > 0},
            "problem": self.problem,
        }

    def longest_layers(self, most: int = 40) -> list[tuple[str, float]]:
        """Layers by falling microseconds."""
        return sorted(self.layers.items(), key=lambda item: -item[1])[:most]


@dataclass
class Race:
    """The engines that were built; `mixed` where some attentions looked faster on TensorRT's own kernels, `fused` where
    the model has fused regions."""

    plain: Candidate
    stof: Candidate
    mixed: Candidate | None = None
    fused: Candidate | None = None

    @property
    def candidates(self) -> list[Candidate]:
        return [self.plain, self.stof, *(c for c in (self.mixed, self.fused) if c is not None)]

    def winner(self, keep: str = "faster") -> Candidate:
        """The engine to keep: the fastest one that is right (stof where it is not slower than plain), or `keep`."""
        if keep != "faster":
            return next(c for c in self.candidates if c.kind == keep)
        right = [c for c in self.candidates if c.engine is not None and not c.problem]
        timed = [c for c in right if c.timing is not None]
        order = ("stof", "mixed", "fused", "plain")  # among equals
        key = {c.kind: (c.timing.median if c.timing else float("inf"), order.index(c.kind)) for c in right}
        return min(timed or right or [self.plain], key=lambda c: key.get(c.kind, (0.0, 0)))


@dataclass
class EngineResult:
    """What was built and kept: `kept` is "stof", "mixed", "fused" or "plain"."""

    path: Path
    kept: str
    race: Race

    @property
    def plain(self) -> Candidate:
        return self.race.plain

    @property
    def stof(self) -> Candidate:
        return self.race.stof

    @property
    def best(self) -> Candidate:
        """The fastest one of the engines with plugins."""
        winner = self.race.winner()
        return self.race.stof if winner.kind == "plain" else winner

    @property
    def lowered(self) -> Lowered | None:
        """Of the kept engine, else of the stof engine."""
        kept = next(c for c in self.race.candidates if c.kind == self.kept)
        return kept.lowered or self.race.stof.lowered

    @property
    def speedup(self) -> float | None:
        """How many times as fast the best engine with plugins is."""
        if self.plain.timing is None or self.best.timing is None:
            return None
        return self.plain.timing.median / self.best.timing.median

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"path": str(self.path), "kept": self.kept, "speedup": self.speedup}
        found |= {candidate.kind: candidate.to_json() for candidate in self.race.candidates}
        return found | (self.lowered.to_json() if self.lowered else {"packed": 0, "flattened": 0, "sites": []})


def make_engine(
    source: Path,
    portable: Path,
    target: Path,
    options: BuildOptions,
    feeds: Sequence[dict[str, np.ndarray]],
    expected: Sequence[dict[str, np.ndarray]],
    keep: str = "faster",
) -> EngineResult:
    """Writes the better engine to `target` and its manifest beside it.

    Args:
        source, portable: the original model and the optimized one.
        options: `plugins` names the library; its profile bounds every dynamic input.
        feeds: input sets at the sizes to tune for: both engines are checked on all and timed on the first.
        keep: "faster", or "stof" or "plain" whatever the times are.
        expected: the original's outputs on each of `feeds`; none: the plain engine's are taken (--no-verify).

    Raises:
        StofError: neither engine can be built, or neither is right.
    """
    entrants = race(source, portable, options, feeds, expected)
    kept = entrants.winner(keep)
    if kept.engine is None or kept.problem:
        problems = "; ".join(f"{c.kind}: {c.problem or 'fine'}" for c in entrants.candidates)
        raise StofError(f"no engine: {problems}", str(source))
    write_bytes(target, kept.engine.data)
    result = EngineResult(target, kept.kind, entrants)
    write_manifest(manifest_of(target), _manifest(result, options))
    return result


def race(
    source: Path,
    portable: Path,
    options: BuildOptions,
    feeds: Sequence[dict[str, np.ndarray]],
    expected: Sequence[dict[str, np.ndarray]],
) -> Race:
    """Builds, checks and times the engines, as `make_engine` describes it; writes nothing."""
    with turns.building():
        found = Race(build_plain(source, options), build_stof(portable, options))
    settle(found, portable, options, feeds, expected)
    return found


def build_plain(source: Path, options: BuildOptions) -> Candidate:
    """The engine of the model as it is; `problem` is set where it can not be built."""
    candidate = Candidate("plain")
    _build(candidate, source, replace(options, plugins=None))
    return candidate


def build_stof(
    portable: Path, options: BuildOptions, left: frozenset[str] = frozenset(), regions: bool = False
) -> Candidate:
    """The engine with plugins.

    Args:
        left: names of attentions that TensorRT keeps (the mixed engine).
        regions: with the fused regions of the model (the fused engine); else they are ordinary operators.
    """
    lowering = lower_options(options.precision, options.profile, availability.device())
    single = availability.version() < (10,)  # it compiles some runs operator by operator
    lowered = lower_file(portable, replace(lowering, left=left, regions=regions, mark_runs=single))
    candidate = Candidate("fused" if regions else "mixed" if left else "stof", lowered=lowered)
    if regions and not lowered.fused:
        reasons = {region.reason for region in lowered.regions}
        candidate.problem = f"no region was lowered: {'; '.join(sorted(reasons))}"
        return candidate
    if not lowered.plugins:
        candidate.problem = "no attention was lowered"
        return candidate
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lowered.onnx"
        save_lowered(lowered.model, path)
        lowered.model = onnx.ModelProto()  # the file and the engine hold the weights
        _build(candidate, path, options)
    return candidate


def settle(
    found: Race,
    portable: Path,
    options: BuildOptions,
    feeds: Sequence[dict[str, np.ndarray]],
    expected: Sequence[dict[str, np.ndarray]],
) -> None:
    """Runs and times what was built, tries a mixed engine where one looks faster and one with the fused regions where
    the model has any, and notes errors and problems.

    Args:
        found: its fused engine may be built already.
        expected: outputs of each of `feeds`; none: the plain engine's.
    """
    with turns.alone():
        for candidate in (found.plain, found.stof, found.fused):
            if candidate is not None and candidate.timing is None:
                _run(candidate, feeds)
    left = _to_leave(found)
    if left:
        with turns.building():
            found.mixed = build_stof(portable, options, left)
        with turns.alone():
            _run(found.mixed, feeds)
    if found.fused is None and found.stof.lowered is not None and found.stof.lowered.has_regions:
        mixed = found.mixed is not None and found.mixed.timing is not None and found.winner().kind == "mixed"
        with turns.building():
            fused = build_stof(portable, options, left if mixed else frozenset(), regions=True)
        if fused.lowered is not None and fused.lowered.regions:  # else what looked like a rotation was none
            found.fused = fused
            with turns.alone():
                _run(fused, feeds)
    _judge(found, expected or found.plain.outputs, options.precision)


def _to_leave(found: Race) -> frozenset[str]:
    plain, stof = found.plain.timing, found.stof.timing
    if plain is None or stof is None or found.stof.lowered is None:
        return frozenset()
    return sites_to_leave(found.stof.lowered.sites, found.stof.layers, 1e3 * plain.median, 1e3 * stof.median)


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
        _log.info("no %s engine: %s", candidate.kind, error)


def _run(candidate: Candidate, feeds: Sequence[dict[str, np.ndarray]]) -> None:
    """Runs and times what was built, as a whole and layer by layer."""
    if candidate.engine is None:
        return
    try:
        session = EngineSession(candidate.engine.data)
        try:
            candidate.memory, candidate.load_seconds = session.memory, session.load_seconds
            candidate.outputs = [session.run(one) for one in feeds]
            candidate.timing = session.time(feeds[0])
            _log.info("%s engine: %.4f ms", candidate.kind, candidate.timing.median)
            candidate.layers = session.layer_times(feeds[0])
        finally:
            session.close()
    except StofError as error:
        candidate.problem = str(error)


def _judge(found: Race, expected: Sequence[dict[str, np.ndarray]], precision: str) -> None:
    """Notes the errors, and puts out of the race what is wrong."""
    for candidate in found.candidates:
        if candidate.outputs and expected:
            candidate.error = worst(map(measure, candidate.outputs, expected))
        candidate.outputs = []
        wrong = candidate.error is not None and not passes(candidate.error, found.plain.error, precision)
        if wrong and candidate is not found.plain:
            assert candidate.error is not None
            candidate.problem = f"wrong outputs: relative error {candidate.error.relative:.2e}"


def _manifest(result: EngineResult, options: BuildOptions) -> dict[str, Any]:
    plugins = None
    if result.kept != "plain" and options.plugins is not None:
        path = options.plugins.resolve()
        plugins = {"path": str(path), "sha256": digest(path), "embedded": options.embed}
    return {
        "engine": result.path.name,
        "sha256": digest(result.path),
        "kept": result.kept,
        "tensorrt": availability.tensorrt().__version__,
        "gpu": cuda.name(),
        "arch": availability.device().arch,
        "precision": options.precision,
        "half_io": options.half_io,
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
                raise StofError(f"axis {axis} of the input '{name}' has no bounds", "TensorRT profile", advice)
            sizes.append(bound)
        profile[name] = tuple(sizes)
    return profile
