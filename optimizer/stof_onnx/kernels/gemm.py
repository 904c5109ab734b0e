"""The GEMM templates of StofFusedRegion: their compiled variants, and what a launch will cost.

Needs neither the library nor a GPU. The table repeats cuda/src/fused/variants.h; a test holds both together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

AUTO = "auto"  # the node attribute `config` that leaves the choice to the library at each launch


@dataclass(frozen=True)
class GemmVariant:
    """One variant: its output tile, the blocks that share a tile of b, whether epilogues hide behind products."""

    name: str
    tile_m: int
    tile_n: int
    cluster: int
    ping_pong: bool


VARIANTS: dict[str, tuple[GemmVariant, ...]] = {
    "gemm_epilogue": (
        GemmVariant("coop_128x256_c2", 128, 256, 2, False),
        GemmVariant("coop_128x256", 128, 256, 1, False),
        GemmVariant("pingpong_128x128_c2", 128, 128, 2, True),
        GemmVariant("pingpong_128x128", 128, 128, 1, True),
        GemmVariant("pingpong_128x192_c2", 128, 192, 2, True),
        GemmVariant("pingpong_128x192", 128, 192, 1, True),
        GemmVariant("coop_128x192_c2", 128, 192, 2, False),
        GemmVariant("coop_128x192", 128, 192, 1, False),
        GemmVariant("coop_128x128", 128, 128, 1, False),
        GemmVariant("split_128x64_k4", 128, 64, 1, False),
        GemmVariant("split_128x64_k8", 128, 64, 1, False),
    ),
    "gated_mlp": (
        GemmVariant("coop_128x128_c2", 128, 128, 2, False),
        GemmVariant("coop_128x128", 128, 128, 1, False),
        GemmVariant("pingpong_128x64_c2", 128, 64, 2, True),
        GemmVariant("coop_128x64", 128, 64, 1, False),
    ),
}


@dataclass(frozen=True)
class GemmDevice:
    """What estimates assume of a GPU."""

    multiprocessors: int = 132
    flops: float = 680e12  # of large products, at the clock that they leave
    bandwidth: float = 4.2e12  # bytes a second of device memory
    launch_us: float = 3.0


H200 = GemmDevice()


def configs(template: str) -> tuple[str, ...]:
    """Names of the variants of a template, as the node attribute `config` takes them.

    Raises:
        KeyError: there is no such GEMM template.
    """
    return tuple(v.name for v in VARIANTS[template])


def estimate_us(template: str, config: str, m: int, n: int, k: int, device: GemmDevice = H200) -> float:
    """Predicted microseconds of one launch on [m, k] x [k, n] (a gated region computes two of them).

    Waves of tiles at the device's matrix rate, plus the epilogue where nothing hides it, or the bytes of inputs and
    output at its bandwidth, whichever takes longer.
    """
    (variant,) = (v for v in VARIANTS[template] if v.name == config)
    factors = 2 if template == "gated_mlp" else 1
    tiles = ceil(m / (variant.tile_m * variant.cluster)) * ceil(n / variant.tile_n)
    waves = ceil(tiles / (device.multiprocessors // variant.cluster))
    area = variant.tile_m * variant.tile_n * factors
    rate = device.flops / device.multiprocessors * min(1.0, area / 16384) ** 0.5  # small tiles wait for shared memory
    products_us = 2.0 * area * 64 * ceil(k / 64) / rate * 1e6
    epilogue_us = (0.1 if variant.ping_pong else 1.0) * area / 32768
    moved = 2.0 * (m * k + factors * k * n + m * n)
    return device.launch_us + max(waves * (products_us + epilogue_us), moved / device.bandwidth * 1e6)


def ranked(template: str, m: int, n: int, k: int, device: GemmDevice = H200) -> list[str]:
    """The variants by rising estimate for these sizes."""
    return sorted(configs(template), key=lambda name: estimate_us(template, name, m, n, k, device))
