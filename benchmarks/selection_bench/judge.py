"""How good picks are: the time of the picked configuration over the time of the best one, case by case."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stof_onnx.kernels.configs import KernelConfig, Tilings, candidates
from stof_onnx.kernels.cost_model import predict_us
from stof_onnx.kernels.device_profile import DeviceProfile
from stof_onnx.kernels.eq1 import row_wise_by_eq1
from stof_onnx.kernels.work import work_of
from stof_onnx.mask.statistics import statistics

from .cases import SETS, Case
from .fit import Observation
from .sweep import encoded, site_of

WITHIN, WORST = 1.05, 1.3


@dataclass(frozen=True)
class Measured:
    """One case: its work in every configuration that was timed, and the times in µs."""

    case: Case
    observations: dict[KernelConfig, Observation]
    eq1_row_wise: bool
    density: float

    @property
    def best(self) -> KernelConfig:
        """The fastest."""
        return min(self.observations, key=lambda c: self.observations[c].us)

    def only(self, kernels: Iterable[str]) -> Measured:
        """The case with some kernel families left out."""
        kept = {c: o for c, o in self.observations.items() if c.kernel in set(kernels)}
        return Measured(self.case, kept, self.eq1_row_wise, self.density)


@dataclass(frozen=True)
class Score:
    """Of one way to pick: each case's time over the best one's."""

    name: str
    ratios: tuple[float, ...]

    @property
    def within(self) -> float:
        """Share of the cases within 5 % of the best."""
        return sum(r <= WITHIN for r in self.ratios) / len(self.ratios)

    @property
    def worst(self) -> float:
        """Of the cases."""
        return max(self.ratios)

    @property
    def mean(self) -> float:
        """Geometric."""
        return math.exp(sum(math.log(r) for r in self.ratios) / len(self.ratios))


def read(path: Path, name: str) -> tuple[list[Measured], dict[str, Any]]:
    """The cases of a set in a results file, and the last line's environment. Of each time the newest counts."""
    cases = {c.key: c for c in SETS[name]}
    times: dict[str, dict[str, float]] = {}
    last: dict[str, Any] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["set"] == name and line["case"] in cases:
            times[line["case"]] = {**times.get(line["case"], {}), **line["us"]}
            last = line
    return [_measured(cases[key], us, last["arch"]) for key, us in times.items()], last


def _measured(case: Case, us: dict[str, float], arch: int) -> Measured:
    mask, site, best = encoded(case), site_of(case), min(us.values())
    tilings = Tilings(mask)
    configs = [c for c in candidates(tilings, site, arch) if c.label in us]
    # GPUs before Hopper choose among the others: those are judged by the best of their own.
    older = min((us[c.label] for c in configs if c.kernel != "block_sm90"), default=best)
    found = {
        c: Observation(work_of(tilings, c, site), us[c.label], best if c.kernel == "block_sm90" else older)
        for c in configs
    }
    return Measured(case, found, row_wise_by_eq1(mask), statistics(mask).density)


def pick(measured: Measured, profile: DeviceProfile) -> KernelConfig:
    """The configuration that the model predicts to be the fastest."""
    return min(measured.observations, key=lambda c: predicted(measured, c, profile))


def predicted(measured: Measured, config: KernelConfig, profile: DeviceProfile) -> float:
    """Microseconds of a configuration by the model."""
    work = measured.observations[config].work
    return predict_us(work, profile.instances[work.instance.key], profile.figures)


def pick_eq1(measured: Measured, block: Callable[[Measured], KernelConfig]) -> KernelConfig:
    """Eq. 1 between the kernels; `block` picks among the block-wise configurations."""
    if measured.eq1_row_wise:
        return next(c for c in measured.observations if c.kernel == "row_wise")
    return block(measured.only(("block_sm80", "block_sm90")))


def scores(cases: Sequence[Measured], profile: DeviceProfile) -> list[Score]:
    """The model; Eq. 1 with the model's, and with the best measured, block-wise configuration; and fixed choices."""

    def fixed(*wanted: tuple[str, int]) -> Callable[[Measured], KernelConfig]:
        """The first of these kernels and tile heights that was timed, nothing split."""

        def first(m: Measured) -> KernelConfig:
            plain = {(c.kernel, c.tile_m): c for c in m.observations if c.label == f"{c.kernel} {c.tile_m}x64"}
            return next(plain[w] for w in wanted if w in plain)

        return first

    usual = fixed(("block_sm90", 192), ("block_sm90", 128), ("block_sm80", 64))
    ways: dict[str, Callable[[Measured], KernelConfig]] = {
        "this model": lambda m: pick(m, profile),
        "Eq. 1, the model's block-wise configuration": lambda m: pick_eq1(m, lambda b: pick(b, profile)),
        "Eq. 1, the best block-wise configuration in hindsight": lambda m: pick_eq1(m, lambda b: b.best),
        "Eq. 1, one block-wise configuration": lambda m: pick_eq1(m, usual),
        "that one configuration everywhere": usual,
    }
    return [Score(name, tuple(_ratio(m, way(m)) for m in cases)) for name, way in ways.items()]


def _ratio(measured: Measured, config: KernelConfig) -> float:
    return measured.observations[config].us / measured.observations[measured.best].us
