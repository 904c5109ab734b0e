"""The GEMM templates of StofFusedRegion: their compiled variants, and what a launch will cost.

Needs neither the library nor a GPU. The tables repeat cuda/src/fused/variants.h, `ranked` begins with the library's own
automatic choice; tests hold both together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

AUTO = "auto"  # the node attribute `config` that leaves the choice to the library at each launch
CUBLASLT = "cublaslt"  # the variant of gemm_epilogue that is a library's, where there is one; on any GPU from sm_80 on
STEP = 64  # of k, that costs count
_GROUP, _SMALL_CLUSTER = 16, 3  # multiprocessors of a group; blocks from which on a cluster does not fill it
COSTLY = ("gelu_erf", "gelu_tanh", "silu")  # activations that take time of their own


@dataclass(frozen=True)
class GemmVariant:
    """One variant: its output tile, and nanoseconds on an H200.

    Attributes:
        cluster: blocks that share a tile of the weights, each with an output tile of its own.
        split: blocks that share one output tile, each with a part of k.
        longest: blocks side by side that own whole rows, at most; 0 where rows do not matter.
        launch_ns: of a launch.
        step_ns: of a step of 64 along k.
        tile_ns: of what else a tile takes.
        activation_ns: of a GELU or SiLU in it.
    """

    name: str
    tile_m: int
    tile_n: int
    cluster: int
    split: int
    launch_ns: int
    step_ns: int
    tile_ns: int
    activation_ns: int
    longest: int = 0

    def fits(self, n: int) -> bool:
        """Whether it takes rows of n."""
        return not self.longest or ceil(n / self.tile_n) <= self.longest


VARIANTS: dict[str, tuple[GemmVariant, ...]] = {
    "gemm_epilogue": (
        GemmVariant("coop_128x256_c2", 128, 256, 2, 1, 3900, 641, 2120, 1900),
        GemmVariant("pingpong_128x128_c2", 128, 128, 2, 1, 4100, 328, 630, 730),
        GemmVariant("pingpong_128x128", 128, 128, 1, 1, 3000, 335, 940, 610),
        GemmVariant("coop_128x192", 128, 192, 1, 1, 3100, 487, 2200, 1320),
        GemmVariant("coop_128x64", 128, 64, 1, 1, 2200, 267, 1460, 430),
        GemmVariant("split_128x64_k2", 128, 64, 1, 2, 2500, 280, 2000, 200),
        GemmVariant("split_128x64_k4", 128, 64, 1, 4, 2500, 300, 2100, 200),
        GemmVariant("split_128x64_k8", 128, 64, 1, 8, 2500, 500, 2000, 300),
    ),
    "gated_mlp": (
        GemmVariant("coop_128x128_c2", 128, 128, 2, 1, 3500, 830, 0, 0),
        GemmVariant("pingpong_128x64_c2", 128, 64, 2, 1, 4500, 395, 10, 0),
        GemmVariant("coop_128x64", 128, 64, 1, 1, 1900, 475, 10, 0),
    ),
    "gemm_norm": (
        GemmVariant("rows128_columns192", 128, 192, 1, 1, 7100, 553, 1900, 0, 8),
        GemmVariant("rows128_columns128", 128, 128, 1, 1, 6000, 359, 1500, 0, 8),
    ),
}


@dataclass(frozen=True)
class GemmDevice:
    """What estimates assume of a GPU."""

    multiprocessors: int = 132
    flops: float = 680e12  # of large products by a library
    bandwidth: float = 4.2e12  # bytes a second of device memory
    launch_us: float = 3.0


H200 = GemmDevice()


def configs(template: str) -> tuple[str, ...]:
    """Names of the variants of a template, as the node attribute `config` takes them.

    Raises:
        KeyError: there is no such GEMM template.
    """
    return tuple(v.name for v in VARIANTS[template])


def cublaslt_lacks(activation: str, residual: bool) -> str:
    """Why CUBLASLT does not compute such a gemm_epilogue; empty where it does."""
    if activation not in ("none", "relu", "gelu_tanh"):
        return f"cuBLASLt has no {activation}"
    return "cuBLASLt adds a residual ahead of the activation" if residual and activation != "none" else ""


def _clusters(blocks: int, device: GemmDevice) -> int:
    """Clusters that run at a time: larger ones leave a part of each group of multiprocessors idle."""
    if blocks < _SMALL_CLUSTER:
        return device.multiprocessors // blocks
    return device.multiprocessors // _GROUP * (_GROUP // blocks)


def _busy_ns(v: GemmVariant, m: int, n: int, k: int, activation: str, device: GemmDevice) -> int:
    """Nanoseconds of a launch, as fused_auto_config counts them."""
    across = ceil(n / v.tile_n)
    tiles = ceil(m / (v.tile_m * v.cluster)) * (1 if v.longest else across)
    at_a_time = _clusters(across, device) if v.longest else device.multiprocessors // (v.cluster * v.split)
    waves = ceil(tiles / max(at_a_time, 1))
    steps = ceil(ceil(k / STEP) / v.split)
    return v.launch_ns + waves * (steps * v.step_ns + v.tile_ns + (v.activation_ns if activation in COSTLY else 0))


def estimate_us(
    template: str, config: str, m: int, n: int, k: int, device: GemmDevice = H200, activation: str = "none"
) -> float:
    """Predicted microseconds of one launch on [m, k] x [k, n] (a gated region computes two of them).

    Waves of tiles, or the bytes of inputs and output at the device's bandwidth, whichever takes longer.
    """
    (variant,) = (v for v in VARIANTS[template] if v.name == config)
    factors = 2 if template == "gated_mlp" else 1
    moved = 2.0 * (m * k + factors * k * n + m * n)
    busy_us = _busy_ns(variant, m, n, k, activation, device) * 1e-3
    return max(busy_us, device.launch_us + moved / device.bandwidth * 1e6)


def ranked(template: str, m: int, n: int, k: int, device: GemmDevice = H200, activation: str = "none") -> list[str]:
    """The variants that take these sizes, by rising estimate."""
    found = [v for v in VARIANTS[template] if v.fits(n)]
    return [v.name for v in sorted(found, key=lambda v: _busy_ns(v, m, n, k, activation, device))]
