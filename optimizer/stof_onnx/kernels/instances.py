"""The compiled kernel that a configuration runs on: what the cost model has one set of coefficients for.

Mirrors the instance tables of cuda/src (tests/kernels/test_instances.py holds it to them).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from stof_onnx.kernels.configs import KernelConfig, KernelSite, hopper_runs, sm80_tiles, sm90_tiles
from stof_onnx.kernels.lower_sm90 import BAND

# (largest head size, rows, columns): blocks an SM. The exact half-precision instances of cuda/src/block_exact.cuh.
SM80_EXACT = {
    (32, 64, 64): 4,
    (64, 64, 32): 6,
    (64, 64, 64): 4,
    (64, 128, 64): 2,
    (64, 128, 32): 3,
    (96, 64, 64): 3,
    (128, 64, 32): 3,
    (128, 64, 64): 2,
    (128, 128, 64): 2,
}
# Largest head size: (rows, columns, blocks an SM). cuda/src/block_general_half.cu and block_f32.cu (FFMA).
SM80_GENERAL = {64: (64, 32, 4), 128: (64, 32, 3), 256: (64, 32, 2)}
SM80_F32 = {64: (64, 32, 3), 128: (64, 32, 2), 256: (32, 32, 2)}
SM90_DIMS = (32, 64, 96, 128, 192, 256)
ROW_DIMS = (32, 64, 128, 256)  # cuda/src/row_wise.cu
ROW_WARPS = 4  # query rows of a row-wise block
ROW_RESIDENT = {True: 8, False: 5}  # without and with score modifiers


@dataclass(frozen=True)
class Instance:
    """One compiled kernel.

    Attributes:
        family: of `configs.KERNELS`.
        key: its name in profiles, unique.
        dim: largest head size it serves.
        rows, cols: query rows of a block and keys of one step.
        resident: blocks that share a multiprocessor, where shared memory does not limit them further.
        shared_bytes: shared memory of a block.
    """

    family: str
    key: str
    dim: int
    rows: int
    cols: int
    resident: int
    shared_bytes: int = 0


def instance_of(config: KernelConfig, site: KernelSite) -> Instance:
    """The instance that runs `config`, as cuda/src/forward.cpp finds it; `config` must be one that can run."""
    if config.kernel == "row_wise":
        dim = _fitting(ROW_DIMS, site.widest)
        kind = ("f32" if site.dtype == "fp32" else "half") + ("" if site.plain else " general")
        return Instance("row_wise", f"row_wise {kind} d{dim}", dim, ROW_WARPS, 64, ROW_RESIDENT[site.plain])
    if config.kernel == "block_sm90":
        dim, bands = _fitting(SM90_DIMS, site.widest), config.tile_m // BAND
        key = f"block_sm90 d{dim} {config.tile_m}x{config.tile_n}"
        return Instance("block_sm90", key, dim, BAND * bands, config.tile_n, 1)
    if site.dtype == "fp32":
        return _general("f32", SM80_F32, site)
    m, n = config.tile_m, config.tile_n
    dims = [d for d, rows, cols in SM80_EXACT if (rows, cols) == (m, n) and d >= site.widest]
    general = _general("general", SM80_GENERAL, site)
    if not site.plain or not dims or general.dim < min(dims):
        return general
    dim = min(dims)
    key = f"block_sm80 d{dim} {m}x{n}"
    return Instance("block_sm80", key, dim, m, n, SM80_EXACT[dim, m, n], _shared_bytes(m, n, dim, 2))


def all_instances() -> list[Instance]:
    """Every instance there is."""
    found: dict[str, Instance] = {}
    for dtype, softcap, dim in product(("fp16", "fp32"), (0.0, 1.0), (32, 64, 96, 128, 192, 256)):
        site = KernelSite(1, 1, dim, dim, dtype, 1.0, softcap)
        configs = [KernelConfig("row_wise", 64, 64), *(KernelConfig("block_sm80", m, n) for m, n in sm80_tiles(site))]
        if hopper_runs(site, 90):
            configs += [KernelConfig("block_sm90", m, n) for m, n in sm90_tiles(site)]
        for instance in (instance_of(c, site) for c in configs):
            found[instance.key] = instance
    return list(found.values())


def _general(kind: str, table: dict[int, tuple[int, int, int]], site: KernelSite) -> Instance:
    dim = _fitting(table, site.widest)
    rows, cols, resident = table[dim]
    key = f"block_sm80 {kind} d{dim} {rows}x{cols}"
    shared = _shared_bytes(rows, cols, dim, 4 if kind == "f32" else 2)
    return Instance("block_sm80", key, dim, rows, cols, resident, shared)


def _shared_bytes(rows: int, cols: int, dim: int, element: int) -> int:
    """Q, and two stages of K and V; fp32 of head size 256 has one stage."""
    stages = 1 if element == 4 and dim == 256 else 2
    return element * dim * (rows + 2 * stages * cols)


def _fitting(dims: tuple[int, ...] | dict[int, tuple[int, int, int]], wanted: int) -> int:
    return min(d for d in dims if d >= wanted)
