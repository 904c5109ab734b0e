"""`stof-onnx bench`: what an engine takes, and what it is compared with takes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stof_onnx.files import check_source
from stof_onnx.options import DimRange
from stof_onnx.trt.build import BuildOptions, build_engine, tactic_sources
from stof_onnx.trt.engine_step import is_engine, load_engine
from stof_onnx.trt.manifest import precision_of, read_manifest
from stof_onnx.trt.session import EngineSession, Timing


@dataclass(frozen=True)
class BenchLine:
    """One engine: times, memory on the device in bytes, the leading axis of its first input, what loading it took."""

    name: str
    timing: Timing
    memory: int
    batch: int
    load_seconds: float

    @property
    def throughput(self) -> float:
        """Batch entries a second."""
        return 1e3 * self.batch / self.timing.median


@dataclass(frozen=True)
class EngineBench:
    """Lines of what was timed, and the shapes it was timed at."""

    lines: tuple[BenchLine, ...]
    shapes: dict[str, tuple[int, ...]]

    def text(self) -> Iterator[str]:
        """For the terminal."""
        yield "inputs " + ", ".join(f"{n} {'x'.join(map(str, s))}" for n, s in self.shapes.items())
        for line in self.lines:
            t = line.timing
            how = "CUDA graph" if t.graph else "launches"
            yield (
                f"{line.name}: median {t.median:.4f} ms, p90 {t.p90:.4f}, p99 {t.p99:.4f} ({how}, {t.count} runs), "
                f"{line.throughput:.1f} batch entries a second, {line.memory / 2**20:.0f} MiB, "
                f"loaded in {line.load_seconds:.2f} s"
            )
        if len(self.lines) == 2:
            yield f"{self.lines[1].timing.median / self.lines[0].timing.median:.2f} times as fast"
        yield f"TensorRT tactic sources: {tactic_sources()}"


def bench_engine(engine: Path, against: Path | None, seed: int | None) -> EngineBench:
    """Times `engine`, and `against` (an engine, or an ONNX model that is built plain with the same types).

    Raises:
        StofError: TensorRT or a GPU is missing, or something does not load or build.
    """
    if against is not None:
        check_source(against)
    session = load_engine(engine)
    shapes = session.opt_shapes()
    rng = np.random.default_rng(secrets.randbits(32) if seed is None else seed)
    feeds = {}
    for name, shape in shapes.items():
        kind = session.dtype(name)
        feeds[name] = (rng.standard_normal(shape) if kind.kind == "f" else rng.integers(0, 2, shape)).astype(kind)
    lines = [_line(engine, session, feeds)]
    session.close()
    if against is not None:
        other = _other(engine, against, shapes)
        lines.append(_line(against, other, feeds))
        other.close()
    return EngineBench(tuple(lines), shapes)


def _line(path: Path, session: EngineSession, feeds: dict[str, np.ndarray]) -> BenchLine:
    first = next(iter(feeds.values()), np.zeros(1))
    batch = first.shape[0] if first.ndim else 1
    return BenchLine(path.name, session.time(feeds), session.memory, batch, session.load_seconds)


def _other(engine: Path, against: Path, shapes: dict[str, tuple[int, ...]]) -> EngineSession:
    if is_engine(against):
        return load_engine(against)
    profile = {name: tuple(DimRange(d, d, d) for d in shape) for name, shape in shapes.items()}
    manifest = read_manifest(engine)
    precision, half_io = precision_of(manifest), bool(manifest.get("half_io", False))
    return EngineSession(build_engine(against, BuildOptions(precision, profile, half_io=half_io)).data)
