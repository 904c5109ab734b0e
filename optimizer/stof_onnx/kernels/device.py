"""What kernels are chosen for."""

from __future__ import annotations

from dataclasses import dataclass

from stof_onnx.kernels.configs import KERNELS


@dataclass(frozen=True)
class Device:
    """A GPU, and the kernels that are there for it.

    Attributes:
        arch: compute capability times ten (90: H100, H200).
        multiprocessors: 0 takes the count of the arch's largest known part.
        kernels: kernel families that the plugin library holds.
        name: as the driver gives it; "" for any of that arch.
    """

    arch: int = 90
    multiprocessors: int = 0
    kernels: tuple[str, ...] = KERNELS
    name: str = ""
