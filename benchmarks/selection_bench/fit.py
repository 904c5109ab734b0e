"""Fits the cost model's coefficients to measured times, one kernel instance after the other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from stof_onnx.kernels.cost_model import NAMES, Coefficients, Figures, predict_us
from stof_onnx.kernels.instances import Instance
from stof_onnx.kernels.work import Work

# Where the fit of each family starts: a head size of 64, from a first fit.
_START = {
    "block_sm80": Coefficients(
        launch=2.0, alone_full=1.0, alone_part=1.1, alone_item=1.0, shared_full=0.4, shared_part=0.45, shared_piece=0.3,
        alone_entry=0.02, shared_entry=0.02, alone_first=0.05, shared_first=0.02, sharpness=1.5, tail=0.3, io=0.15,
        join=6.0, join_bytes=0.35, join_piece=0.5, counter=1.5,
    ),
    "block_sm90": Coefficients(
        launch=1.5, alone_full=0.35, alone_part=0.35, alone_item=2.0, shared_full=0.2, shared_part=0.23,
        shared_piece=0.2, alone_entry=0.05, shared_entry=0.12, alone_first=0.05, shared_first=0.25, sharpness=2.0,
        tail=0.2, io=0.18, join=6.0, join_bytes=0.35, join_piece=0.3, counter=1.7,
    ),
    "row_wise": Coefficients(
        launch=3.0, alone_full=1.0, alone_part=0.5, alone_item=2.0, shared_full=0.1, shared_part=0.05, shared_piece=0.1,
        alone_entry=0.02, shared_entry=0.02, alone_first=0.02, shared_first=0.02, sharpness=1.5, tail=0.5, io=0.23,
        join=6.0, join_bytes=0.35, join_piece=0.5, counter=1.5,
    ),
}  # fmt: skip
_STEPS = tuple(f"{where}_{what}" for where in ("alone", "shared") for what in ("full", "part", "entry", "first"))
_NOISE = 0.02  # of a time, as a logarithm
_LOOSE, _TIED = 1.0, 0.4  # how far coefficients may be from where they start, as a logarithm
_FAR = 3.0  # times slower than the best: such times choose nothing
_ROUNDS = 40


@dataclass(frozen=True)
class Observation:
    """One configuration's work and measured time, and the best time among its rivals in the case."""

    work: Work
    us: float
    best: float


def fit(observations: Sequence[Observation], device: Figures) -> dict[str, Coefficients]:
    """Coefficients of every instance that was observed.

    The instance seen most often in a family starts from the guess; the others start from the nearest one fitted, scaled
    by the arithmetic of a step, and are held closer to it.
    """
    families: dict[str, dict[str, list[Observation]]] = defaultdict(lambda: defaultdict(list))
    for o in (o for o in observations if o.us <= _FAR * o.best):
        families[o.work.instance.family][o.work.instance.key].append(o)
    found: dict[str, Coefficients] = {}
    for family, instances in sorted(families.items()):
        known: list[Instance] = []
        for key in sorted(instances, key=lambda k: (-len(instances[k]), k)):
            instance = instances[key][0].work.instance
            nearest = min(known, key=lambda i: _distance(i, instance), default=None)
            start = _START[family] if nearest is None else _carried(found[nearest.key], nearest, instance)
            found[key] = fit_instance(instances[key], start, _LOOSE if nearest is None else _TIED, device)
            known.append(instance)
    return found


def complete(found: Mapping[str, Coefficients], instances: Sequence[Instance]) -> dict[str, Coefficients]:
    """`found`, with coefficients carried over for the instances that were never observed."""
    by_key = {i.key: i for i in instances}
    done = dict(found)
    for instance in instances:
        known = [by_key[key] for key in found if by_key[key].family == instance.family]
        if instance.key not in found and known:
            nearest = min(known, key=lambda i: _distance(i, instance))
            done[instance.key] = _carried(found[nearest.key], nearest, instance)
    return done


def fit_instance(
    observations: Sequence[Observation], start: Coefficients, looseness: float, device: Figures
) -> Coefficients:
    """Levenberg-Marquardt on the logarithms of coefficients (so they stay positive) and of times.

    Times near their case's best weigh more: they are what the choice depends on.
    """
    measured = np.log([o.us for o in observations])
    weight = np.sqrt([o.best / o.us for o in observations]) / _NOISE
    origin = np.log([getattr(start, n) for n in NAMES])

    def residuals(theta: np.ndarray) -> np.ndarray:
        c = Coefficients(*np.exp(theta))
        error = np.log([predict_us(o.work, c, device) for o in observations]) - measured
        return np.concatenate([_robust(error * weight), (theta - origin) / looseness])

    theta, damping = origin.copy(), 1e-2
    now = residuals(theta)
    for _ in range(_ROUNDS):
        slope = np.stack([(residuals(theta + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(theta))], axis=1)
        normal = slope.T @ slope
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope.T @ now)
        tried = theta + np.clip(move, -1.0, 1.0)
        then = residuals(tried)
        gain = float(now @ now - then @ then)
        if gain > 0:
            theta, now, damping = tried, then, damping / 4
            if gain < 1e-5 * float(now @ now):
                break
        else:
            damping *= 8
            if damping > 1e6:
                break
    return Coefficients(*(float(x) for x in np.exp(theta)))


def errors(observations: Sequence[Observation], found: Mapping[str, Coefficients], device: Figures) -> np.ndarray:
    """|log(predicted / measured)| of each observation."""
    predicted = [predict_us(o.work, found[o.work.instance.key], device) for o in observations]
    return np.abs(np.log(predicted) - np.log([o.us for o in observations]))


def _robust(x: np.ndarray) -> np.ndarray:
    """Large residuals grow as a square root: a few odd times must not bend the fit."""
    size = np.abs(x)
    return np.sign(x) * np.where(size > 3.0, np.sqrt(np.maximum(6.0 * size - 9.0, 0.0)), size)


def _distance(a: Instance, b: Instance) -> float:
    kinds = a.key.split()[1][0] != b.key.split()[1][0]
    return 10.0 * kinds + abs(math.log(_arithmetic(a) / _arithmetic(b)))


def _arithmetic(i: Instance) -> float:
    """What a step costs, up to a factor: scores and outputs grow with the head size, the softmax does not."""
    return i.rows * i.cols * (i.dim + 32.0)


def _carried(c: Coefficients, known: Instance, wanted: Instance) -> Coefficients:
    ratio = _arithmetic(wanted) / _arithmetic(known)
    return Coefficients(**{n: getattr(c, n) * (ratio if n in _STEPS else 1.0) for n in NAMES})
