"""One kernel to compile, by content: what the cache is keyed by and what travels to the compiling process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from stof_onnx.errors import StofError

ARCHS = (80, 86, 89, 90)  # what is tested; other NVIDIA architectures that Triton knows work alike
_LAYOUT = 1  # part of every key: count up when cached files change their meaning


@dataclass(frozen=True)
class KernelRequest:
    """A kernel's source and how to compile it.

    Attributes:
        source: a Python module with the kernel.
        kernel: its name in the module.
        signature: name and Triton type of each parameter, in order.
        aligned: whether it may assume that pointers are multiples of 16.
        warps: of a thread block.
        arch: compute capability times ten.
        stages: of loops that load what products of matrices read; None: Triton's own choice.
    """

    source: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    aligned: bool
    warps: int
    arch: int
    stages: int | None = None

    def __post_init__(self) -> None:
        if not 80 <= self.arch <= 999:
            raise StofError(f"sm_{self.arch} is no architecture to compile for", "kernels", "Use 80, 86, 89 or 90")

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides the machine code but Triton's version."""
        return hashlib.sha256(f"{_LAYOUT}\0{self.to_json()}".encode()).hexdigest()

    def to_json(self) -> str:
        """One line of JSON."""
        data = {name: value for name, value in self.__dict__.items() if value is not None}
        return json.dumps(data, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> KernelRequest:
        """What `to_json` wrote."""
        data = json.loads(text)
        data["signature"] = tuple((name, kind) for name, kind in data["signature"])
        return KernelRequest(**data)
