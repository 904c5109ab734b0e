"""The cases: masks x shapes x dtypes. `calibrate` fits the model; `evaluate` shares no shape and few masks with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from stof_onnx.mask import RowBands
from stof_onnx.mask.sources import all_keys, causal, window


@dataclass(frozen=True)
class Case:
    """A mask (name:parameter, as `source` takes it) and a shape; a softcap needs the general instances."""

    mask: str
    batch: int
    heads: int
    seq: int
    dim: int
    dtype: str = "fp16"
    softcap: float = 0.0

    @property
    def key(self) -> str:
        """Identifies the case in the results."""
        capped = "-softcap" if self.softcap else ""
        return f"{self.mask}-{self.batch}x{self.heads}x{self.seq}x{self.dim}-{self.dtype}{capped}"


def source(name: str, seq: int) -> RowBands:
    """The mask's rows. Parameters are counts of keys, blocks or per mille; 0 stands for max(32, sqrt(S))."""
    kind, _, parameter = name.partition(":")
    number = int(parameter or 0)
    width = number or max(32, int(seq**0.5))
    rng = np.random.default_rng(number + seq)
    if kind == "full":
        return all_keys(seq, seq)
    if kind == "causal":
        return causal(seq, seq)
    if kind == "window":
        return window(seq, seq, width, width)
    if kind == "causal_window":
        return window(seq, seq, width, 0)
    if kind == "longformer":
        return _either(window(seq, seq, width, width), lambda q, k: (q < width) | (k < width))
    if kind == "prefix":  # bidirectional prefix, then causal
        return _either(causal(seq, seq), lambda q, k: k < width)
    if kind == "block_diagonal":
        return lambda q0, q1: np.arange(q0, q1)[:, None] // width == np.arange(seq)[None] // width
    if kind == "documents":  # packed documents of unequal lengths, causal inside each
        ends = np.cumsum(rng.integers(max(1, width // 4), 2 * width, 4 * seq // width + 8))
        document = np.searchsorted(ends, np.arange(seq), "right")
        return _either(_none(seq), lambda q, k: (document[q] == document[k]) & (k <= q))
    if kind == "strided":  # sparse transformer: the last `width` keys and every width-th
        return _either(window(seq, seq, width, 0), lambda q, k: (k % width == 0) & (k <= q))
    if kind == "bigbird":  # blocks of 64; neighbours, first and last, `number` random ones a row
        return _blocks(seq, 64, 1, True, number, rng)
    if kind == "blocks":  # `number` random blocks of 64 a row and the diagonal
        return _blocks(seq, 64, 0, False, number, rng)
    if kind == "random":  # per mille of the elements, and the diagonal
        return _random(seq, number / 1000, rng)
    raise ValueError(f"no mask {name}")


def _none(seq: int) -> RowBands:
    return lambda q0, q1: np.zeros((q1 - q0, seq), np.bool_)


def _either(rows: RowBands, allowed) -> RowBands:  # type: ignore[no-untyped-def]
    def band(q0: int, q1: int) -> np.ndarray:
        out = rows(q0, q1)
        out |= allowed(np.arange(q0, q1)[:, None], np.arange(out.shape[1])[None])
        return out

    return band


def _blocks(seq: int, block: int, near: int, ends: bool, random: int, rng: np.random.Generator) -> RowBands:
    n = -(-seq // block)
    i = np.arange(n)
    table = abs(i[:, None] - i[None]) <= near
    if ends:
        table[[0, -1]] = table[:, [0, -1]] = True
    for row in table:
        row[rng.permutation(n)[:random]] = True
    return lambda q0, q1: table[np.arange(q0, q1)[:, None] // block, np.arange(seq)[None] // block]


def _random(seq: int, density: float, rng: np.random.Generator) -> RowBands:
    table = rng.random((seq, seq), np.float32) < density
    np.fill_diagonal(table, True)
    return lambda q0, q1: table[q0:q1]


def _cross(
    shapes: tuple[tuple[int, int, int, int], ...], masks: tuple[str, ...], dtype: str = "fp16", softcap: float = 0.0
) -> Iterator[Case]:
    for shape, mask in product(shapes, masks):
        yield Case(mask, *shape, dtype, softcap)


CALIBRATE = [
    *_cross(
        ((1, 12, 128, 64), (16, 12, 256, 64), (1, 12, 512, 64), (16, 12, 512, 64), (8, 12, 1024, 64), (2, 12, 2048, 64),
         (16, 12, 2048, 64), (1, 12, 4096, 64), (16, 12, 4096, 64), (1, 16, 1024, 128), (8, 16, 1024, 128),
         (1, 16, 4096, 128), (4, 16, 4096, 128)),
        ("causal", "window", "longformer", "bigbird:3", "random:100", "random:5", "full"),
    ),
    *_cross(((1, 12, 16384, 64), (1, 16, 8192, 128)), ("causal", "window", "longformer", "bigbird:3")),
    *_cross(
        ((1, 8, 512, 32), (8, 8, 2048, 32), (8, 8, 1024, 80), (2, 8, 4096, 96), (2, 8, 2048, 192), (4, 8, 1024, 256),
         (1, 8, 4096, 256)),
        ("causal", "window", "bigbird:3", "random:20"),
    ),
    *_cross(((1, 12, 512, 64), (8, 12, 1024, 64), (2, 16, 2048, 128)), ("causal", "window", "bigbird:3"), "bf16"),
    *_cross(
        ((1, 12, 512, 64), (8, 12, 1024, 64), (2, 16, 1024, 128)), ("causal", "window", "bigbird:3", "random:5"), "fp32"
    ),
    *_cross(((1, 12, 512, 64), (8, 12, 1024, 64), (2, 16, 2048, 128)), ("causal", "window", "random:5"), "fp16", 20.0),
    *_cross(
        ((1, 12, 256, 64), (8, 12, 128, 64), (1, 12, 1024, 64), (4, 20, 384, 64), (8, 16, 768, 64), (4, 16, 1536, 64),
         (1, 20, 3072, 64), (8, 12, 4096, 64), (1, 32, 512, 128), (2, 32, 2048, 128), (1, 8, 6144, 128)),
        ("causal", "window:48", "causal_window:300", "longformer:20", "bigbird:2", "blocks:4", "documents:200",
         "prefix:100", "strided:64", "random:30", "random:2"),
    ),
    *_cross(((1, 12, 12288, 64), (2, 16, 8192, 64)), ("causal", "window:256", "bigbird:2", "documents:1000")),
    *_cross(
        ((2, 10, 640, 40), (8, 6, 1536, 32), (4, 8, 1536, 96), (2, 4, 2048, 160), (2, 8, 1024, 192)),
        ("causal", "window:100", "longformer:64", "blocks:4"),
    ),
    *_cross(((2, 12, 768, 64), (2, 8, 1536, 128)), ("causal", "causal_window:128", "blocks:3"), "bf16"),
    *_cross(((2, 12, 384, 64), (4, 8, 1536, 64), (1, 16, 768, 128)), ("causal", "window:64", "blocks:3"), "fp32"),
    *_cross(((2, 12, 768, 64), (1, 16, 1536, 128)), ("causal", "window:48", "blocks:4"), "fp16", 20.0),
    *_cross(((1, 8, 256, 32), (2, 8, 512, 128), (16, 8, 256, 128)), ("causal", "window", "bigbird:3", "random:20")),
    *_cross(
        ((1, 16, 768, 96), (1, 12, 1792, 192), (4, 4, 1024, 192), (2, 8, 1536, 256)),
        ("causal", "window:60", "longformer:40", "blocks:4", "random:20"),
    ),
    *_cross(
        ((1, 16, 2048, 128), (8, 16, 2048, 128)),
        ("causal", "window:100", "longformer:40", "bigbird:3", "random:50", "documents:300"),
    ),
    *_cross(((4, 8, 512, 64), (1, 8, 2048, 64)), ("causal", "window:80", "bigbird:2"), "fp32"),
    *_cross(((4, 8, 512, 64), (1, 8, 2048, 64)), ("causal", "window:80", "bigbird:2"), "fp16", 20.0),
]  # fmt: skip
EVALUATE = [
    *_cross(
        ((1, 16, 192, 64), (2, 12, 320, 64), (4, 12, 448, 64), (16, 12, 640, 64), (2, 16, 896, 64), (8, 16, 1792, 64),
         (1, 12, 2560, 64), (4, 12, 3584, 64), (2, 16, 384, 128), (4, 32, 896, 128), (1, 24, 3072, 128)),
        ("causal", "window:40", "causal_window:200", "longformer:48", "bigbird:4", "blocks:2", "documents:150",
         "prefix:200", "strided:48", "block_diagonal:128", "random:60", "random:8"),
    ),
    *_cross(((1, 16, 6144, 64), (1, 8, 12288, 128)), ("causal", "window:200", "bigbird:4", "documents:800")),
    *_cross(
        ((4, 8, 768, 32), (2, 12, 1280, 80), (1, 16, 1280, 96), (2, 8, 640, 160), (1, 16, 1280, 192),
         (1, 8, 2304, 256)),
        ("causal", "window:70", "longformer:32", "blocks:3"),
    ),
    *_cross(((4, 12, 896, 64), (1, 8, 1792, 128)), ("causal", "causal_window:150", "blocks:5"), "bf16"),
    *_cross(((1, 12, 640, 64), (2, 8, 896, 64), (2, 8, 640, 128)), ("causal", "window:90", "blocks:4"), "fp32"),
    *_cross(((1, 12, 896, 64), (2, 8, 1280, 128)), ("causal", "window:90", "blocks:3"), "fp16", 20.0),
]  # fmt: skip
SETS = {"calibrate": CALIBRATE, "evaluate": EVALUATE}
