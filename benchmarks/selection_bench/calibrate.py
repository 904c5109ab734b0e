"""From measured cases to a device profile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from stof_onnx.errors import StofError
from stof_onnx.kernels.cost_model import Figures
from stof_onnx.kernels.device import Device
from stof_onnx.kernels.device_profile import FORMAT, datasheet_of
from stof_onnx.kernels.instances import all_instances

from . import fit
from .judge import Measured

_DIGITS, _NEAR = 4, 1.3


def write_profile(cases: Sequence[Measured], environment: dict[str, Any], out: Path) -> Iterator[str]:
    """Fits all instances and writes the profile; yields what to print.

    Raises:
        StofError: there are no cases, or no datasheet figures for their GPU.
    """
    if not cases:
        raise StofError("the results hold no case of the calibration set", str(out), "Run `selection.py measure` first")
    sheet = datasheet_of(Device(environment["arch"], environment["sms"], name=environment["gpu"]))
    figures = Figures(environment["sms"], sheet.figures.cache_bytes, sheet.figures.shared_bytes)
    observations = [o for case in cases for o in case.observations.values()]
    found = fit.complete(fit.fit(observations, figures), all_instances())
    error = fit.errors(observations, found, figures)
    near = np.array([o.us <= _NEAR * o.best for o in observations])
    profile = {
        "format": FORMAT,
        "gpu": environment["gpu"],
        "arch": environment["arch"],
        **asdict(figures),
        "date": environment["date"],
        "driver": environment["driver"],
        "commit": environment["commit"],
        "cases": len(cases),
        "times": len(observations),
        "median_error": round(float(np.median(error)), _DIGITS),
        "median_error_near_best": round(float(np.median(error[near])), _DIGITS),
        "instances": {
            key: {name: float(f"{value:.{_DIGITS}g}") for name, value in asdict(c).items()}
            for key, c in sorted(found.items())
        },
    }
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.write_text(json.dumps(profile, indent=1) + "\n")
    temporary.replace(out)
    for key in sorted(found):
        own = np.array([o.work.instance.key == key for o in observations])
        errors = f"{np.median(error[own]):.1%}, 95 % below {np.quantile(error[own], 0.95):.1%}" if own.any() else "-"
        yield f"{key:28s} {own.sum():4d} times, median error {errors}"
    yield f"{out}: {len(cases)} cases, {len(observations)} times, median error {np.median(error):.1%}"
