"""Device profiles: the cost model's coefficients of a GPU, measured once or derived from its datasheet.

A measured profile is a file in `profiles/`, made by `benchmarks/selection.py calibrate`. Any other GPU gets one derived
from a measured profile by datasheet figures, and is marked as such.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from stof_onnx.errors import StofError
from stof_onnx.kernels.cost_model import NAMES, Coefficients, Figures
from stof_onnx.kernels.device import Device

FORMAT = 1
_DATASHEETS = "datasheets.json"
_STEP_KINDS = ("full", "part", "entry", "first")
_PRODUCTS = 0.6  # of a step's throughput: about what the tensor pipe is busy in the sm_80 kernels (cuda/NOTES.md)
_ADVICE = "Make it anew with `python benchmarks/selection.py calibrate`"


@dataclass(frozen=True)
class Datasheet:
    """Figures of a GPU.

    Attributes:
        gpu: name as the driver gives it.
        arch: compute capability times ten.
        tensor_tflops: dense fp16 with fp32 sums, through mma.sync.
    """

    gpu: str
    arch: int
    multiprocessors: int
    clock_mhz: float
    tensor_tflops: float
    fp32_tflops: float
    bandwidth_gbs: float
    cache_mib: float
    shared_kib: float

    @property
    def figures(self) -> Figures:
        """What the cost model takes of them."""
        return Figures(self.multiprocessors, self.cache_mib * 2**20, self.shared_kib * 2**10)

    def with_multiprocessors(self, count: int) -> Datasheet:
        """A part of the same design with another count: its rates grow with it."""
        ratio = count / self.multiprocessors
        return replace(
            self,
            multiprocessors=count,
            tensor_tflops=self.tensor_tflops * ratio,
            fp32_tflops=self.fp32_tflops * ratio,
            bandwidth_gbs=self.bandwidth_gbs * ratio,
        )


@dataclass(frozen=True)
class DeviceProfile:
    """Coefficients of every kernel instance on a GPU.

    Attributes:
        derived: from another GPU's measurements, by datasheet figures.
        origin: one line for the report.
    """

    gpu: str
    arch: int
    figures: Figures
    instances: dict[str, Coefficients]
    derived: bool
    origin: str


def read_profile(text: str, where: str) -> DeviceProfile:
    """A measured profile from its JSON.

    Raises:
        StofError: it is damaged, of another format, or has a coefficient that is missing, not a number or not positive.
    """
    data = _object(text, where)
    try:
        instances = {str(k): _coefficients(k, v, where) for k, v in data["instances"].items()}
        figures = Figures(*(_positive(data[n], n, where) for n in ("multiprocessors", "cache_bytes", "shared_bytes")))
        gpu, arch, date = str(data["gpu"]), int(data["arch"]), str(data["date"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StofError(f"the device profile is damaged ({type(error).__name__}: {error})", where, _ADVICE) from error
    if not instances:
        raise StofError("the device profile has no kernel instances", where, _ADVICE)
    return DeviceProfile(gpu, arch, figures, instances, False, f"measured on an {gpu} on {date[:10]}")


@lru_cache(maxsize=16)
def profile_for(device: Device) -> DeviceProfile:
    """The measured profile of `device` if there is one, else one derived from the measured profile nearest in arch."""
    measured = _measured()
    sheet = datasheet_of(device)
    for profile in measured:
        if profile.gpu == sheet.gpu and profile.figures.multiprocessors == sheet.multiprocessors:
            return profile
    base = min(measured, key=lambda p: abs(p.arch - device.arch))
    return derive(base, _sheet_named(base.gpu), sheet)


def datasheet_of(device: Device) -> Datasheet:
    """By name, else the first of the arch (or of the next lower one), with the device's count of multiprocessors."""
    sheets = datasheets()
    named = [s for s in sheets if s.gpu == device.name]
    if not named:
        below = [s for s in sheets if s.arch <= device.arch] or sheets[:1]
        arch = max(s.arch for s in below)
        named = [s for s in below if s.arch == arch]
        if device.name:  # another part of the arch
            named = [replace(named[0], gpu=device.name)]
    return named[0].with_multiprocessors(device.multiprocessors or named[0].multiprocessors)


def derive(base: DeviceProfile, known: Datasheet, wanted: Datasheet) -> DeviceProfile:
    """`base`, measured on the GPU of the datasheet `known`, carried over to `wanted`.

    What a step takes from a multiprocessor's throughput grows, as far as it is products, as the arithmetic rate falls
    (tensor cores; fp32 for the row-wise and the fp32 kernels), the rest of it as the clock falls. A step alone takes
    its latency, which goes with the clock, and at least that throughput. Launches, starts and ends go with the clock,
    bytes with the bandwidth.
    """
    clock = known.clock_mhz / wanted.clock_mhz
    bandwidth = known.bandwidth_gbs / wanted.bandwidth_gbs
    tensor, fp32 = (
        (getattr(known, n) / known.multiprocessors) / (getattr(wanted, n) / wanted.multiprocessors)
        for n in ("tensor_tflops", "fp32_tflops")
    )

    def scaled(key: str, c: Coefficients) -> Coefficients:
        rate = fp32 if key.startswith("row_wise") or " f32 " in key else tensor
        by = (
            dict.fromkeys(NAMES, clock)
            | dict.fromkeys(("io", "join_bytes"), bandwidth)
            | {"tail": 1.0, "sharpness": 1.0}
        )
        by |= {f"shared_{what}": _PRODUCTS * rate + (1 - _PRODUCTS) * clock for what in _STEP_KINDS}
        values = {name: getattr(c, name) * by[name] for name in NAMES}
        for what in _STEP_KINDS:
            if getattr(c, f"alone_{what}") >= getattr(c, f"shared_{what}"):
                values[f"alone_{what}"] = max(values[f"alone_{what}"], values[f"shared_{what}"])
        return Coefficients(**values)

    instances = {key: scaled(key, c) for key, c in base.instances.items()}
    origin = f"derived for {wanted.gpu} from datasheet figures and what was {base.origin}"
    return DeviceProfile(wanted.gpu, wanted.arch, wanted.figures, instances, True, origin)


@lru_cache(maxsize=1)
def datasheets() -> tuple[Datasheet, ...]:
    """The GPUs that profiles can be derived for."""
    data = _object(_packaged(_DATASHEETS), _DATASHEETS)
    return tuple(Datasheet(**entry) for entry in data["devices"])


def _sheet_named(gpu: str) -> Datasheet:
    return next(s for s in datasheets() if s.gpu == gpu)


@lru_cache(maxsize=1)
def _measured() -> tuple[DeviceProfile, ...]:
    files = sorted(f.name for f in _folder().iterdir() if f.name.endswith(".json") and f.name != _DATASHEETS)
    return tuple(read_profile(_packaged(name), name) for name in files)


def _folder() -> Any:
    return resources.files("stof_onnx.kernels") / "profiles"


def _packaged(name: str) -> str:
    return str((_folder() / name).read_text("utf-8"))


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise StofError(f"the device profile is not JSON ({error})", where, _ADVICE) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise StofError(f"the device profile has format {found!r}, expected {FORMAT}", where, _ADVICE)
    return data


def _coefficients(key: str, values: dict[str, Any], where: str) -> Coefficients:
    if set(values) != set(NAMES):
        odd = ", ".join(sorted(set(values) ^ set(NAMES)))
        raise StofError(f"the coefficients of {key!r} do not fit: {odd}", where, _ADVICE)
    return Coefficients(**{name: _positive(values[name], f"{key}: {name}", where) for name in NAMES})


def _positive(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise StofError(f"{name} is {value!r}, expected a positive number", where, _ADVICE)
    return value
