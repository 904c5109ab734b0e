"""Tables of times: a search can be replayed on them, as often as one likes and without a GPU.

A table file has one JSON line a time: `timer` (device, versions, precision), `key` (of a region or a piece) and
`config` (empty for pieces), as the plan cache knows them, `us` (null where it does not run), the `seconds` that
measuring took and the `build_seconds` among them; the first time of a region also holds `configs`, all that there are,
the most promising one first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stof_onnx.errors import StofError
from stof_onnx.fusion.piece_model import piece_key
from stof_onnx.fusion.search import Measurement, Region, Timer
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates import GEMM_TEMPLATES


@dataclass
class Table:
    """A timer that answers from what is known, and asks another one, where it has one, for the rest.

    Attributes:
        name: of the timer whose times these are.
        timer: who is asked.
        times, lists: measurements by key and configuration; configurations by key.
        file: where new times are appended.
        programs: configurations of a compiled program that there are to choose from, as of trt/region_timer.py; None
            for all. GEMMs have all theirs.
    """

    name: str
    timer: Timer | None = None
    times: dict[tuple[str, str], Measurement] = field(default_factory=dict)
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)
    file: Path | None = None
    programs: int | None = None

    def configs(self, region: Region) -> Sequence[str]:
        key = region.key
        if key not in self.lists:
            self.lists[key] = tuple(self.timer.configs(region)) if self.timer else ()
        return self.lists[key][: None if region.instance.template in GEMM_TEMPLATES else self.programs]

    def fused(self, region: Region, config: str) -> Measurement:
        key = region.key, config
        if key not in self.times:
            self.keep(key, self._timer(*key).fused(region, config))
        return self.times[key]

    def left(self, piece: Segment) -> Measurement:
        key = piece_key(piece), ""
        if key not in self.times:
            self.keep(key, self._timer(*key).left(piece))
        return self.times[key]

    def keep(self, key: tuple[str, str], found: Measurement) -> None:
        """Notes a time, also in the file."""
        self.times[key] = found
        if self.file is None:
            return
        us = round(found.us, 3) if math.isfinite(found.us) else None
        line: dict[str, object] = {"timer": self.name, "key": key[0], "config": key[1], "us": us}
        line |= {"seconds": round(found.seconds, 3), "build_seconds": round(found.build_seconds, 3)}
        line |= {"problem": found.problem} if found.problem else {}
        known = self.lists.get(key[0], ())
        line |= {"configs": known} if known[:1] == (key[1],) else {}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _timer(self, key: str, config: str) -> Timer:
        if self.timer is None:
            raise StofError(f"no time of {key} {config}", self.name, "Measure the whole space first")
        return self.timer


def read_tables(path: Path) -> dict[str, Table]:
    """The tables of a file, by the names of their timers.

    Raises:
        StofError: it is no table file.
    """
    tables: dict[str, Table] = {}
    try:
        for line in map(json.loads, path.read_text().splitlines()):
            table = tables.setdefault(line["timer"], Table(line["timer"]))
            us = math.inf if line["us"] is None else float(line["us"])
            measured = Measurement(us, line["seconds"], line["build_seconds"], line.get("problem", ""))
            table.times[line["key"], line["config"]] = measured
            if "configs" in line:
                table.lists[line["key"]] = tuple(line["configs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StofError(
            f"no table of times ({error})", str(path), "Make one: python -m benchmarks.fusion_space"
        ) from error
    return tables
