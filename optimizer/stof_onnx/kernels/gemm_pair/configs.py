"""How a pair of products may be laid out on the GPU, and what it will take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, prod

from stof_onnx.errors import StofError
from stof_onnx.kernels.gemm import H200, GemmDevice
from stof_onnx.kernels.gemm_pair.pair import GemmPair

_LEAST_TILE = 16  # of tensor cores
_LANES = 32
_MOST_SUMS = 128  # of both products that a lane holds; more would spill
_MOST_SHARED = 99 << 10  # bytes of a thread block: of the smallest GPUs from sm_80 on
_LAUNCH_US = 1.5  # of a launch, beside what its thread blocks take
_NAME = re.compile(r"m(\d+)n(\d+)k(\d+)p(\d+)w(\d+)s(\d+)")


@dataclass(frozen=True)
class PairConfig:
    """One variant of a pair's kernel.

    Attributes:
        rows: of a thread block (a power of two).
        columns: of the output that are computed at once (a power of two).
        step: of the first sum (a power of two).
        parts: thread blocks that share the columns of an output row; each computes the hidden row itself.
        warps: of a thread block.
        stages: tiles of a sum that are in flight.
    """

    rows: int
    columns: int
    step: int
    parts: int
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """What plans and reports call it."""
        return f"m{self.rows}n{self.columns}k{self.step}p{self.parts}w{self.warps}s{self.stages}"

    @staticmethod
    def parse(name: str) -> PairConfig:
        """The configuration of that name.

        Raises:
            StofError: there is none.
        """
        found = _NAME.fullmatch(name)
        if not found:
            raise StofError(f"is no configuration of a pair of GEMMs: {name[:40]}", "pair of GEMMs")
        return PairConfig(*map(int, found.groups()))


@dataclass(frozen=True)
class _Cost:
    """What a variant takes on an H200; fitted to measurements (cuda/NOTES_fused.md).

    Attributes:
        turn_ns: of a step of the first sum, or of the columns that are computed at once.
        hidden_ns: of it, for each hidden column.
        share: of a thread block's time that another one on its multiprocessor adds.
    """

    turn_ns: float
    hidden_ns: float
    share: float


_COSTS = {
    PairConfig(128, 64, 64, 1, 8, 3): _Cost(882, 1.9, 1.11),
    PairConfig(64, 64, 64, 1, 4, 3): _Cost(617, 2.1, 0.68),
    PairConfig(64, 64, 64, 4, 4, 3): _Cost(413, 1.3, 0.53),
    PairConfig(32, 64, 64, 4, 4, 4): _Cost(265, 2.3, 0.48),
    PairConfig(32, 64, 128, 6, 4, 3): _Cost(351, 5.4, 0.53),
    PairConfig(16, 64, 128, 12, 4, 3): _Cost(238, 3.6, 0.52),
    PairConfig(16, 32, 64, 12, 4, 4): _Cost(153, 1.9, 0.49),
}


def padded(n: int) -> int:
    """Columns of the tile that holds n of them."""
    return max(_LEAST_TILE, 1 << (n - 1).bit_length())


def check_config(pair: GemmPair, config: PairConfig) -> None:
    """Refuses what no kernel can be made of.

    Raises:
        StofError: see above.
    """
    tiles = config.rows, config.columns, config.step
    powers = all(_LEAST_TILE <= n <= 256 and n & (n - 1) == 0 for n in tiles)
    if not powers or config.warps not in (1, 2, 4, 8, 16) or not 1 <= config.stages <= 8 or not 1 <= config.parts <= 64:
        raise StofError(f"is no configuration of a pair of GEMMs: {config.name}", "pair of GEMMs")
    if not fits(pair, config):
        raise StofError(f"configuration {config.name} does not hold {pair.hidden} columns", "pair of GEMMs")


def fits(pair: GemmPair, config: PairConfig) -> bool:
    """Whether a thread block's registers and shared memory hold the tiles."""
    hidden = padded(pair.hidden)
    sums = config.rows * (hidden + config.columns) / (_LANES * config.warps)
    first = config.stages * config.step * (config.rows + hidden)
    second = (config.stages * hidden + config.rows) * config.columns
    if config.rows < _LEAST_TILE * config.warps:  # warps share rows, and read each other's part of them
        second += config.rows * hidden
    return sums <= _MOST_SUMS and 2 * max(first, second) <= _MOST_SHARED


def configurations(pair: GemmPair) -> list[PairConfig]:
    """Every variant that was the best one at some number of rows, and that holds the pair."""
    return [config for config in _COSTS if fits(pair, config)]


def moved_bytes(pair: GemmPair, rows: int) -> int:
    """Bytes of inputs and output, each once."""
    return 2 * (sum(map(prod, pair.shapes(rows).values())) + rows * pair.width)


def estimate_us(pair: GemmPair, config: PairConfig, rows: int, device: GemmDevice = H200) -> float:
    """Predicted microseconds of one launch: its thread blocks, or its bytes, whichever take longer.

    Raises:
        StofError: nothing is known of this variant.
    """
    if config not in _COSTS:
        raise StofError(f"no time of configuration {config.name} is known", "pair of GEMMs")
    cost = _COSTS[config]
    turns = ceil(pair.depth / config.step) + ceil(pair.width / config.columns / config.parts)
    blocks = ceil(rows / config.rows) * config.parts
    crowd = 1.0 + cost.share * max(0.0, blocks / device.multiprocessors - 1.0)
    busy = _LAUNCH_US + crowd * turns * (cost.turn_ns + cost.hidden_ns * padded(pair.hidden)) * 1e-3
    return max(busy, device.launch_us + moved_bytes(pair, rows) / device.bandwidth * 1e6)


def ranked(pair: GemmPair, rows: int, device: GemmDevice = H200) -> list[PairConfig]:
    """`configurations` by rising estimate."""
    return sorted(configurations(pair), key=lambda config: estimate_us(pair, config, rows, device))
