"""What the search asks of a timer. Timers: roofline.py (no GPU), trt/region_timer.py (GPU), synthetic ones in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates import Instance


@dataclass(frozen=True)
class Region:
    """A segment with the template that computes it."""

    segment: Segment
    instance: Instance

    @property
    def key(self) -> str:
        """What its time depends on, which no epsilon does: equal ones are timed once, also of different models."""
        i = self.instance
        if i.template == "chain":
            return self.segment.hash
        attributes = " ".join(f"{name}={value}" for name, value in sorted(i.attributes.items()) if name != "epsilon")
        return f"{i.template} {attributes} {i.rows}x{i.width}x{i.depth} {i.dtype}"


@dataclass(frozen=True)
class Measurement:
    """Microseconds of one run (infinite where it does not run), and the seconds that finding out took.

    `build_seconds`: of them, spent building engines rather than measuring. `problem`: why it does not run.
    """

    us: float
    seconds: float = 0.0
    build_seconds: float = 0.0
    problem: str = ""


class Timer(Protocol):
    """Times regions and what they compete with."""

    @property
    def name(self) -> str:
        """What times are made with: device and versions. Part of the cache's key."""

    def configs(self, region: Region) -> Sequence[str]:
        """The compiled variants that can run the region, the most promising one first; empty when there is none."""

    def fused(self, region: Region, config: str) -> Measurement:
        """The region as one node."""

    def left(self, piece: Segment) -> Measurement:
        """Operators that TensorRT compiles on its own, between regions."""


Request = tuple[Region, str] | Segment  # a region in a configuration, or a piece


@runtime_checkable
class ParallelTimer(Timer, Protocol):
    """A timer that measures on several devices at once; see pool.py."""

    @property
    def devices(self) -> int:
        """How many."""

    def many(self, requests: Sequence[Request]) -> list[Measurement]:
        """As `fused` and `left`, in order. The seconds add up to what passes."""
