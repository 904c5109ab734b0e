"""How a row program may be laid out on the GPU, and what it costs at least."""

from __future__ import annotations

from dataclasses import dataclass

from stof_onnx.errors import StofError
from stof_onnx.kernels.triton_rows.ir import DTYPE_BYTES, Kind, RowProgram

_LANES = 32
_MOST_HELD = 64  # fp32 values of one tensor that a lane holds; more would spill
_MOST_WARPS = 16
_MOST_CHUNKS = 16
LAUNCH_US = 2.0  # what a launch costs beside its memory traffic, with CUDA graphs


@dataclass(frozen=True)
class RowConfig:
    """One variant of a program's kernel.

    Attributes:
        block: columns that are handled at once (a power of two); a row is cut into chunks of it.
        rows: rows of one thread block (a power of two).
        warps: of one thread block.
    """

    block: int
    rows: int
    warps: int

    @property
    def name(self) -> str:
        """What plans and reports call it."""
        return f"b{self.block}r{self.rows}w{self.warps}"

    @staticmethod
    def parse(name: str) -> RowConfig:
        """The configuration of that name.

        Raises:
            StofError: there is none.
        """
        head, _, tail = name.removeprefix("b").partition("r")
        rows, _, warps = tail.partition("w")
        if not (name.startswith("b") and head.isdecimal() and rows.isdecimal() and warps.isdecimal()):
            raise StofError(f"is no configuration of a row program: {name[:40]}", "row program")
        return RowConfig(int(head), int(rows), int(warps))


@dataclass(frozen=True)
class Cost:
    """The least a program has to do: each tensor moved once, one operation for each element of each result."""

    bytes: int
    flops: int


def check_config(program: RowProgram, config: RowConfig) -> None:
    """Refuses what no kernel can be made of.

    Raises:
        StofError: see above.
    """
    powers = all(n > 0 and n & (n - 1) == 0 for n in (config.block, config.rows, config.warps))
    chunks = -(-program.cols // config.block) if powers else 0
    if not powers or config.warps > 32 or config.block * config.rows > 1 << 16:
        raise StofError(f"is no configuration of a row program: {config.name}", "row program")
    if program.has_reductions and chunks * config.block * config.rows > _MOST_HELD * 2 * _LANES * config.warps:
        raise StofError(f"configuration {config.name} does not hold rows of {program.cols}", "row program")


def configurations(program: RowProgram) -> list[RowConfig]:
    """Every variant worth measuring, the one to take unmeasured first.

    Raises:
        StofError: no variant holds rows that long.
    """
    found = _of_reductions(program) if program.has_reductions else _of_chains(program)
    if not found:
        raise StofError(f"rows of {program.cols} are too long for a kernel that holds them", "row program")
    for config in found:
        check_config(program, config)
    return found


def _of_reductions(program: RowProgram) -> list[RowConfig]:
    """Each row belongs to 1 to 16 warps, which read 16 bytes a lane at once; short rows share thread blocks."""
    vector = _vector(program)
    ranked: list[tuple[float, RowConfig]] = []
    for per_row in (1, 2, 4, 8, 16):
        block = min(_LANES * vector * per_row, _power_above(program.cols))
        chunks = -(-program.cols // block)
        held = chunks * block / (_LANES * per_row)
        if held > _MOST_HELD or chunks > _MOST_CHUNKS or (per_row > 1 and block < _LANES * vector * per_row):
            continue
        for rows in (1, 2, 4, 8, 16):
            warps = per_row * rows
            if warps not in (2, 4, 8, 16) and not (warps == 1 and per_row == 1):
                continue
            if warps == 16 and rows > 1 and per_row > 1:
                continue
            # Lanes with 16 to 32 values and blocks of four warps have enough loads in flight and occupancy.
            waste = chunks * block / program.cols
            score = waste + abs(held - 24) / 32 + 0.25 * abs(warps.bit_length() - 3)
            ranked.append((score, RowConfig(block, rows, warps)))
    ranked.sort(key=lambda pair: (pair[0], pair[1].name))
    return list(dict.fromkeys(config for _, config in ranked))


def _of_chains(program: RowProgram) -> list[RowConfig]:
    """Elementwise: blocks of columns by rows, two or four vectors a lane."""
    vector = _vector(program)
    found: list[RowConfig] = []
    for warps in (4, 8):
        for vectors in (2, 1, 4):
            elements = _LANES * warps * vector * vectors
            block = min(_block_that_fits(program.cols), elements)
            found.append(RowConfig(block, max(1, min(elements // block, 64)), warps))
    return list(dict.fromkeys(found))


def _vector(program: RowProgram) -> int:
    """Elements of 16 bytes of the narrowest row tensor."""
    types = [t.dtype for t in program.inputs if t.kind is Kind.ROWS] or [out.dtype for out in program.outputs]
    return 16 // min(DTYPE_BYTES[dtype] for dtype in types)


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _block_that_fits(cols: int) -> int:
    """The block, at most 2048, that wastes least of the last chunk; the largest of equal ones."""
    return min((1 << i for i in range(11, 3, -1)), key=lambda block: (-(-cols // block) * block, -block))


def cost(program: RowProgram, rows: int) -> Cost:
    """Bytes and operations of one launch on `rows` rows."""
    kinds = program.kinds

    def elements(kind: Kind) -> int:
        return (rows if kind.per_row else 1) * (program.cols if kind.per_col else 1)

    moved = sum(elements(given.kind) * DTYPE_BYTES[given.dtype] for given in program.inputs)
    moved += sum(elements(kinds[out.value]) * DTYPE_BYTES[out.dtype] for out in program.outputs)
    return Cost(moved, sum(elements(kind) for kind in kinds[len(program.inputs) :]))


def estimate_us(program: RowProgram, rows: int, bandwidth: float, launch_us: float = LAUNCH_US) -> float:
    """Microseconds of one launch by the memory roofline.

    Args:
        bandwidth: of device memory, bytes a second.
    """
    return launch_us + cost(program, rows).bytes / bandwidth * 1e6
