"""What the user asked for: plain values, checked when they are made."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stof_onnx.errors import StofError

_DIMS = re.compile(r"\d+(x\d+)*")
_MOST_DIGITS = 9  # of a size: below 2^31, which TensorRT and the mask format hold
_SHAPE_HELP = "Write --shape NAME:DIMS with DIMS like 1x128; MIN:MAX or MIN:OPT:MAX give a range, e.g. ids:1x16:8x512"


@dataclass(frozen=True)
class DimRange:
    """The sizes one axis may take: min <= opt <= max, all >= 1."""

    min: int
    opt: int
    max: int

    @property
    def static(self) -> bool:
        return self.min == self.max


@dataclass(frozen=True)
class InputShape:
    """The shape the user gave for one graph input."""

    name: str
    dims: tuple[DimRange, ...]


@dataclass(frozen=True)
class ShapeSpec:
    """One `--shape` argument. A tensor name may contain ':', so which part is the name is settled by `resolve`."""

    text: str
    candidates: tuple[InputShape, ...]
    problem: str = ""  # of a reading that is none: told when no other one fits

    @staticmethod
    def parse(text: str) -> ShapeSpec:
        """Reads `name:DIMS`, `name:MIN:MAX` or `name:MIN:OPT:MAX`.

        Raises:
            StofError: when no reading of the text is a name and one to three shapes of equal rank, or a size is 0.
        """
        where = f"--shape {text}"
        parts = text.split(":")
        candidates: list[InputShape] = []
        problem = ""
        for count in (1, 2, 3):
            name, groups = ":".join(parts[:-count]), parts[-count:]
            if len(parts) <= count or not name or not all(_DIMS.fullmatch(g) for g in groups):
                continue
            if any(len(d.lstrip("0")) > _MOST_DIGITS for g in groups for d in g.split("x")):
                problem = f"an axis has at most {10**_MOST_DIGITS - 1} elements"
                continue
            sizes = [tuple(int(d) for d in g.split("x")) for g in groups]
            if len({len(s) for s in sizes}) != 1:
                problem = "the shapes of a range must have the same number of axes"
                continue
            low, high = sizes[0], sizes[-1]
            opt = sizes[1] if count == 3 else high
            if any(d == 0 for s in sizes for d in s):
                problem = "an axis of size 0 holds no data"
                continue
            if any(not lo <= o <= hi for lo, o, hi in zip(low, opt, high, strict=True)):
                problem = "each axis needs min <= opt <= max"
                continue
            dims = tuple(DimRange(lo, o, hi) for lo, o, hi in zip(low, opt, high, strict=True))
            candidates.append(InputShape(name, dims))
        if not candidates:
            raise StofError(problem or "no shape found", where, _SHAPE_HELP)
        return ShapeSpec(text, tuple(candidates), problem)

    def resolve(self, input_ranks: dict[str, int | None]) -> InputShape:
        """Settles on the reading whose name is a graph input and whose rank fits (None: rank unknown).

        Raises:
            StofError: unknown input, wrong rank, or two readings fit.
        """
        where = f"--shape {self.text}"
        named = [c for c in self.candidates if c.name in input_ranks]
        if not named and self.problem:
            raise StofError(self.problem, where, _SHAPE_HELP)
        if not named:
            names = ", ".join(input_ranks) or "none"
            raise StofError(f"the model has no input '{self.candidates[-1].name}'", where, f"Its inputs are: {names}")
        fitting = [c for c in named if input_ranks[c.name] in (None, len(c.dims))]
        if not fitting:
            got, want = len(named[0].dims), input_ranks[named[0].name]
            raise StofError(f"input '{named[0].name}' has {want} axes, the shape has {got}", where, _SHAPE_HELP)
        if len(fitting) > 1:
            names = " and ".join(f"'{c.name}'" for c in fitting)
            raise StofError(f"can be read as a shape for {names}", where, "Give min, opt and max to make it plain")
        return fitting[0]


def parse_shapes(texts: Iterable[str]) -> tuple[ShapeSpec, ...]:
    """Parses every `--shape` argument (see ShapeSpec.parse)."""
    return tuple(ShapeSpec.parse(t) for t in texts)


@dataclass(frozen=True)
class EngineWishes:
    """What `optimize` does about a TensorRT engine.

    Attributes:
        wanted: True: an engine or an error; False: none; None: one where TensorRT and a GPU are there.
        path: where to write it (default: the optimized model's name with .engine).
        precision: "fp16", "bf16" or "fp32".
        embed: put the plugin library into the engine.
        workspace: bytes of scratch memory a layer may use; None leaves it to TensorRT.
        timing_cache: file with measured tactics, read and extended.
        level: TensorRT's builder optimization level, None for its default.
        half_io: float32 inputs and outputs of the engine become float16.
        emit_lowered: where to write the model with plugin nodes.
        keep: "faster", or "stof" or "plain" whatever was timed.
        arch: compute capability times ten that `emit_lowered` is for; 0: the local GPU's, else 90.
    """

    wanted: bool | None = None
    path: Path | None = None
    precision: str = "fp16"
    embed: bool = True
    workspace: int | None = None
    timing_cache: Path | None = None
    level: int | None = None
    half_io: bool = False
    emit_lowered: Path | None = None
    keep: str = "faster"
    arch: int = 0


@dataclass(frozen=True)
class FusionWishes:
    """What `optimize` does about fused regions.

    Attributes:
        tune: search for them.
        budget: seconds of measuring.
        plan: file of a plan: written where one is searched, else read.
    """

    tune: bool = False
    budget: float = 60.0
    plan: Path | None = None


@dataclass(frozen=True)
class OptimizeOptions:
    """Choices of `optimize`, `inspect` and `verify`.

    Attributes:
        shapes: shapes given for graph inputs; an input that is not named keeps the model's own shape.
        assume_no_empty_rows: run-time padding never hides all keys of a row (lets otherwise refused sites through).
        verify: compare the result with the original on ONNX Runtime before it is written.
        samples: random input sets to compare on.
        atol, rtol: tolerance of the comparison; None takes the default of each output's dtype.
        seed: of the random inputs; None draws a fresh one (it is printed and in the report).
        load_inputs: polygraphy JSON with inputs to compare on, instead of random ones.
        load_outputs: polygraphy JSON with the original's outputs on `load_inputs`: engines are compared with these.
        memory_limit: bytes the comparison may take; above the estimate it checks each site on sampled rows instead.
        pictures: folder for one PNG of each distinct mask.
        report: where to write the JSON report.
        engine: what to do about a TensorRT engine.
        fusion: what to do about fused regions.
    """

    shapes: tuple[ShapeSpec, ...] = ()
    assume_no_empty_rows: bool = False
    verify: bool = True
    samples: int = 3
    atol: float | None = None
    rtol: float | None = None
    seed: int | None = None
    load_inputs: Path | None = None
    load_outputs: Path | None = None
    memory_limit: int | None = None
    pictures: Path | None = None
    report: Path | None = None
    engine: EngineWishes = field(default_factory=EngineWishes)
    fusion: FusionWishes = field(default_factory=FusionWishes)
