"""Which kernel runs an attention, in which configuration: what the cost model predicts to be fastest on the device."""

from __future__ import annotations

from dataclasses import dataclass

from stof_onnx.errors import StofError
from stof_onnx.kernels.configs import KERNELS, KernelConfig, KernelSite, Tilings, candidates, lower
from stof_onnx.kernels.cost_model import predict_us
from stof_onnx.kernels.device import Device
from stof_onnx.kernels.device_profile import DeviceProfile, profile_for
from stof_onnx.kernels.work import work_of
from stof_onnx.mask import EncodedMask
from stof_onnx.mask.encoded import I32

__all__ = ["KERNELS", "Device", "KernelChoice", "KernelSite", "LoweredSite", "choose", "lower_site", "predictions"]


@dataclass(frozen=True)
class KernelChoice:
    """A configuration.

    Attributes:
        predicted_us: of a call.
        reason: for the report: what was predicted for it, and for the best of each other kernel family.
        profile: where the predictions come from.
    """

    config: KernelConfig
    predicted_us: float
    reason: str
    profile: str


@dataclass(frozen=True)
class LoweredSite:
    """The seven mask arrays as the chosen kernel reads them, and the plugin node's attributes that go with them."""

    choice: KernelChoice
    arrays: dict[str, I32]
    attributes: dict[str, int | str]


def choose(mask: EncodedMask, site: KernelSite, device: Device) -> KernelChoice:
    """The configuration for one attention; the same arguments give the same one.

    Args:
        mask: in any tiles.

    Raises:
        StofError: none of the device's kernels runs the site.
    """
    profile = profile_for(device)
    times = predictions(Tilings(mask), site, device, profile)
    if not times:
        raise StofError(
            f"none of {', '.join(device.kernels)} runs this attention",
            f"compute capability {device.arch / 10:.1f}",
            "Build the plugin library with the block_sm80 kernels",
        )
    best = min(times, key=times.__getitem__)
    return KernelChoice(best, times[best], _reason(best, times), profile.origin)


def predictions(
    tilings: Tilings, site: KernelSite, device: Device, profile: DeviceProfile
) -> dict[KernelConfig, float]:
    """Microseconds of every configuration that runs the site on the device."""
    times = {}
    for config in candidates(tilings, site, device.arch, device.kernels):
        work = work_of(tilings, config, site)
        if coefficients := profile.instances.get(work.instance.key):
            times[config] = predict_us(work, coefficients, profile.figures)
    return times


def lower_site(mask: EncodedMask, site: KernelSite, device: Device, where: str = "mask") -> LoweredSite:
    """Chooses the configuration and brings the mask into its form.

    Raises:
        StofError: arrays that do not follow the mask format, or no kernel for the site.
    """
    mask.validate(where)
    choice = choose(mask, site, device)
    arrays, attributes = lower(mask, choice.config, where)
    return LoweredSite(choice, arrays, attributes)


def _reason(best: KernelConfig, times: dict[KernelConfig, float]) -> str:
    others = []
    for kernel in dict.fromkeys(c.kernel for c in times if c.kernel != best.kernel):
        other = min((c for c in times if c.kernel == kernel), key=times.__getitem__)
        others.append(f"{other.label} {_us(times[other])}")
    behind = f" ({', '.join(others)})" if others else ""
    return f"{best.label}, predicted {_us(times[best])}{behind}"


def _us(time: float) -> str:
    return f"{time:.1f} µs" if time < 100 else f"{time:.0f} µs"
