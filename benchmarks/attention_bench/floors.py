"""The fair floor: no kernel on tiles of 64 x 64 runs much faster on this chip."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_S = 4.3e12  # measured device-to-device copy of an H200, read plus written
FLOPS = 665e12  # measured fp16 matmul, power-limited
EXP_PER_CLOCK_SM = 16


@dataclass(frozen=True)
class Floor:
    io_us: float
    mma_us: float
    exp_us: float

    @property
    def us(self) -> float:
        return max(self.io_us, self.mma_us, self.exp_us)


def floor(
    batch: int, heads: int, kv_heads: int, seq: int, dim: int, elem: int, tiles: int, sms: int, mhz: float
) -> Floor:
    """`tiles` is the number of non-empty 64 x 64 tiles of one head's mask; `elem` the bytes of an element."""
    io = batch * seq * dim * (2 * heads + 2 * kv_heads) * elem
    scores = batch * heads * tiles * 64 * 64
    return Floor(
        io / BYTES_PER_S * 1e6,
        4 * scores * dim / FLOPS * 1e6,
        scores / (EXP_PER_CLOCK_SM * sms * mhz),  # scores / (per clock * MHz) is microseconds
    )
