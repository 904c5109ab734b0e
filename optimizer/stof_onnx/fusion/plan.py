"""Fusion plans: for each kind of block its scheme, and for each segment what was timed and whether it is fused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from stof_onnx.errors import StofError
from stof_onnx.files import read_source, write_text
from stof_onnx.fusion.scheme import Scheme

_FORMAT = 1
_LONGEST_CONFIG = 31  # what a plugin takes


@dataclass(frozen=True)
class PlannedRegion:
    """One segment that a template computes.

    Attributes:
        start, stop: its operators in the block.
        hash: of the segment.
        operators: their types, for the report.
        template, config: what runs it.
        fused_us, left_us: microseconds as a region, and what leaving it to TensorRT would take in its place; None where
            that was not timed.
        kept: whether it is fused.
        reason: why, or why not.
    """

    start: int
    stop: int
    hash: str
    operators: tuple[str, ...]
    template: str
    config: str
    fused_us: float | None
    left_us: float | None
    kept: bool
    reason: str


@dataclass(frozen=True)
class BlockPlan:
    """What becomes of all blocks of one hash. `bits`: the fusion scheme; `left_us`, `planned_us`: a block's time with
    no region, and as planned."""

    hash: str
    bits: str
    count: int
    regions: tuple[PlannedRegion, ...]
    left_us: float = 0.0
    planned_us: float = 0.0


@dataclass(frozen=True)
class FusionPlan:
    """The plan of a model.

    Attributes:
        timer: what its times are of: "roofline …", which estimates, or a GPU and a TensorRT version.
        precision: that it was made for.
        blocks: by hash.
        samples: configurations that were timed; builds: engines that were built for that.
        seconds, build_seconds: time spent measuring, and building apart.
        cached: times that came from the cache.
        complete: False when Ctrl-C or the budget ended the search early.
    """

    timer: str
    precision: str
    blocks: Mapping[str, BlockPlan]
    samples: int = 0
    builds: int = 0
    seconds: float = 0.0
    build_seconds: float = 0.0
    cached: int = 0
    complete: bool = True
    notes: tuple[str, ...] = field(default=())

    @property
    def estimated(self) -> bool:
        """Its times are estimates: nothing was measured."""
        return self.timer.startswith("roofline")

    @property
    def kept(self) -> int:
        """Regions that are fused, over all blocks."""
        return sum(block.count * sum(r.kept for r in block.regions) for block in self.blocks.values())

    def to_json(self) -> dict[str, Any]:
        """As plain values, for the report and the plan file."""
        value = asdict(self)
        value["blocks"] = [asdict(block) for block in self.blocks.values()]
        return {"format": _FORMAT, **value}

    def write(self, path: Path) -> None:
        """Writes the plan file.

        Raises:
            StofError: it can not be written.
        """
        write_text(path, json.dumps(self.to_json(), indent=2) + "\n")


def read_plan(path: Path) -> FusionPlan:
    """Reads a plan file, or the plan in a report.

    Raises:
        StofError: it is none.
    """
    try:
        value = json.loads(read_source(path))
        value = value if "blocks" in value else (value.get("fusion") or {}).get("plan") or value  # else a report
        if value["format"] != _FORMAT:
            raise StofError(f"a plan of format {value['format']!r}, this is {_FORMAT}", str(path), "Make a new plan")
        blocks = [_block(b) for b in value.pop("blocks")]
        del value["format"]
        value["notes"] = tuple(value.get("notes", ()))
        plan = FusionPlan(blocks={b.hash: b for b in blocks}, **value)
        _check_types(plan)
        return plan
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise StofError(f"not a fusion plan ({what})", str(path), "Make one with --tune-budget and --plan") from error


def _block(value: dict[str, Any]) -> BlockPlan:
    regions = [PlannedRegion(**r | {"operators": tuple(r["operators"])}) for r in value.pop("regions")]
    block = BlockPlan(**value, regions=tuple(regions))
    _check_types(block)
    for region in regions:
        _check_types(region)
    length = len(Scheme.parse(block.bits).bits)
    if any(not 0 <= r.start < r.stop <= length for r in regions):
        raise ValueError("a region outside its block")
    if any(len(r.config) > _LONGEST_CONFIG for r in regions):
        raise ValueError("a configuration that is too long")
    kept = sorted((r.start, r.stop) for r in regions if r.kept)
    if any(start < stop for (_, stop), (start, _) in pairwise(kept)):
        raise ValueError("regions that overlap")
    return block


def _check_types(item: FusionPlan | BlockPlan | PlannedRegion) -> None:
    """Raises ValueError for a field that is not of the type that its annotation names."""
    for name, kind in get_type_hints(type(item)).items():
        value = getattr(item, name)
        allowed = [get_origin(k) or k for k in (get_args(kind) if isinstance(kind, UnionType) else (kind,))]
        numbers = float in allowed and type(value) is int
        if not numbers and not any(isinstance(value, k) and (k is bool or type(value) is not bool) for k in allowed):
            raise ValueError(f"{name} is {value!r}")
        if kind == tuple[str, ...] and not all(isinstance(v, str) for v in value):
            raise ValueError(f"{name} is {value!r}")
