"""The correctness matrix: every axis the kernels promise, then random combinations of all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from stof_onnx.kernels.capi import BitmapOrder, F32Math, Kernel, MaskedRow

from tests.cuda.harness import Case

DIMS = (8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 256)
SEQUENCES = (1, 7, 63, 65, 1000, 4097)
MASKS = (
    "all", "none", "causal", "window", "causal_window", "longformer", "packed", "bigbird", "random", "sparse",
    "empty_rows", "per_head", "per_batch_head",
)  # fmt: skip
# Tiles of the exact sm_80 instances by head-size bucket; any other tile and every modifier runs the general form.
EXACT_TILES = {
    32: ((64, 64),),
    64: ((64, 32), (64, 64), (128, 64), (128, 32)),
    96: ((64, 64),),
    128: ((64, 32), (64, 64), (128, 64)),
}
TILES = ((64, 32), (64, 64), (128, 64), (128, 32), (64, 128), (128, 128))


def _cycle(values: tuple) -> Iterator:
    return itertools.cycle(values)


def exact() -> list[Case]:
    """Every exact instance on every mask, in both bitmap orders."""
    cases = []
    for dtype in ("f16", "bf16"):
        for dim, tiles in EXACT_TILES.items():
            for tile in tiles:
                for i, mask in enumerate(MASKS):
                    order = BitmapOrder((i + (dtype == "f16")) % 2)
                    seq = (130, 257, 65, 200)[i % 4]
                    cases.append(Case(mask, 2, 2, 2, seq, seq, dim, dim, dtype, tile=tile, order=order))
    return cases


def shapes() -> list[Case]:
    """Head sizes, ragged sequences, unequal lengths, GQA, layouts; masks and tiles rotate."""
    cases = []
    masks, layouts = _cycle(MASKS), _cycle(("BHSD", "BSHD"))
    for dtype, dim, seq in itertools.product(("f16", "bf16"), DIMS, (7, 65, 200)):
        cases.append(Case(next(masks), 1, 2, 2, seq, seq, dim, dim, dtype, next(layouts)))
    for dim, v_dim in ((64, 128), (128, 64), (40, 8), (192, 128), (96, 256), (16, 32)):
        cases.append(Case(next(masks), 1, 2, 1, 150, 150, dim, v_dim))
    for seq_q, seq_kv in itertools.product(SEQUENCES[:5], repeat=2):
        cases.append(Case(next(masks), 1, 2, 2, seq_q, seq_kv, 64, 64, "f16", next(layouts), (64, 64)))
        cases.append(Case(next(masks), 1, 2, 2, seq_q, seq_kv, 128, 128, "bf16", next(layouts), (128, 64)))
    for seq in (1000, 4097):
        for mask, tile in (
            ("causal", (128, 64)),
            ("longformer", (64, 64)),
            ("bigbird", (128, 64)),
            ("random", (64, 64)),
        ):
            cases.append(Case(mask, 1, 2, 1, seq, seq, 64, 64, "f16", tile=tile))
            cases.append(Case(mask, 1, 1, 1, seq, seq, 128, 128, "bf16", tile=tile))
    for heads, kv_heads in ((4, 2), (4, 1), (6, 3), (3, 1)):
        for layout in ("BHSD", "BSHD", "packed"):
            cases.append(Case("per_head", 2, heads, kv_heads, 130, 130, 64, 64, "f16", layout))
            cases.append(Case("per_batch_head", 2, heads, kv_heads, 97, 97, 40, 40, "bf16", layout))
    # A mask encoded at the largest sequence serves shorter ones.
    for mask in ("causal", "window", "longformer", "random", "empty_rows"):
        for encoded in ((513, 513), (200, 300), (131, 700)):
            cases.append(Case(mask, 1, 2, 2, 130, 150, 64, 64, tile=(64, 64), encoded=encoded))
            cases.append(Case(mask, 1, 2, 2, 1, 1, 64, 64, tile=(128, 64), encoded=encoded))
    return cases


def modifiers() -> list[Case]:
    """Bias, softcap, key padding, masked rows, scales: the general instances."""
    cases = []
    tiles = _cycle(TILES)
    for dtype, dim in (("f16", 64), ("bf16", 64), ("f16", 128), ("bf16", 96), ("f16", 256), ("bf16", 256)):
        for bias, softcap in itertools.product(("none", "dense", "dense_bh", "relative", "relative_1"), (0.0, 5.0)):
            cases.append(
                Case("window", 2, 2, 2, 130, 130, dim, dim, dtype, tile=next(tiles), bias=bias, softcap=softcap)
            )
        for masked_row, kv in itertools.product(MaskedRow, ("none", "mask", "length")):
            cases.append(
                Case("empty_rows", 2, 2, 1, 100, 130, dim, dim, dtype, tile=next(tiles), kv=kv, masked_row=masked_row)
            )
            cases.append(Case("none", 2, 2, 1, 70, 60, dim, dim, dtype, tile=next(tiles), kv=kv, masked_row=masked_row))
        kinds = itertools.product(MaskedRow, ("causal", "empty_rows"), ("dense_inf", "dense_lowest"))
        for masked_row, mask, bias in kinds:
            cases.append(
                Case(mask, 2, 2, 1, 100, 130, dim, dim, dtype, tile=next(tiles), bias=bias, masked_row=masked_row)
            )
        for scale in (-0.3, 0.0, 1.7):
            cases.append(Case("causal", 1, 2, 2, 130, 130, dim, dim, dtype, tile=next(tiles), scale=scale))
        for kv in ("mask", "length"):
            cases.append(Case("causal", 3, 2, 2, 130, 130, dim, dim, dtype, tile=(64, 64), kv=kv))
    return cases


def fp32() -> list[Case]:
    cases = []
    masks, tiles = _cycle(MASKS), _cycle(TILES)
    for math, dim in itertools.product(F32Math, DIMS):
        cases.append(Case(next(masks), 1, 2, 1, 130, 150, dim, dim, "f32", tile=next(tiles), f32_math=math))
        cases.append(
            Case(next(masks), 2, 2, 2, 65, 65, dim, dim, "f32", "BSHD", next(tiles), f32_math=math, bias="dense")
        )
    for math, masked_row in itertools.product(F32Math, MaskedRow):
        cases.append(
            Case("empty_rows", 2, 2, 1, 100, 90, 64, 64, "f32", f32_math=math, masked_row=masked_row, kv="mask")
        )
    for math in F32Math:
        cases.append(Case("causal", 1, 1, 1, 1000, 1000, 64, 64, "f32", f32_math=math))
        cases.append(Case("causal", 1, 2, 1, 130, 130, 64, 64, "f32", f32_math=math, bias="dense_inf", splits=3))
        cases.append(Case("random", 1, 2, 1, 300, 300, 64, 32, "f32", f32_math=math, splits=3))
    return cases


def splits() -> list[Case]:
    cases = []
    for (dtype, dim, tile), (count, rows) in itertools.product(
        (
            ("f16", 64, (128, 64)),
            ("f16", 64, (64, 64)),
            ("bf16", 128, (64, 64)),
            ("f16", 256, (128, 128)),
            ("f16", 80, (64, 32)),
        ),
        ((2, 0), (5, 1), (16, 2)),
    ):
        for mask in ("causal", "bigbird", "empty_rows"):
            cases.append(Case(mask, 2, 2, 1, 300, 300, dim, dim, dtype, tile=tile, splits=count, split_rows=rows))
        cases.append(
            Case(
                "none",
                1,
                2,
                2,
                65,
                65,
                dim,
                dim,
                dtype,
                tile=tile,
                splits=count,
                split_rows=rows,
                masked_row=MaskedRow.NAN,
            )
        )
        cases.append(
            Case("longformer", 2, 2, 1, 200, 230, dim, dim, dtype, tile=tile, splits=count, split_rows=rows,
                 kv="length", bias="dense")
        )  # fmt: skip
    return cases


def row_wise() -> list[Case]:
    cases = []
    masks, tiles, layouts = _cycle(MASKS), _cycle((*TILES, (16, 16), (64, 8))), _cycle(("BHSD", "BSHD"))
    row = Kernel.ROW_WISE
    for dtype, dim in itertools.product(("f16", "bf16", "f32"), DIMS):
        for seq in (65, 200):
            cases.append(Case(next(masks), 1, 4, 2, seq, seq, dim, dim, dtype, next(layouts), next(tiles), kernel=row))
    for mask, masked_row, kv in itertools.product(("empty_rows", "none"), MaskedRow, ("none", "mask", "length")):
        cases.append(Case(mask, 2, 2, 2, 70, 90, 64, 40, "f16", kernel=row, masked_row=masked_row, kv=kv))
    for masked_row in MaskedRow:
        cases.append(Case("random", 1, 2, 1, 70, 90, kernel=row, bias="dense_inf", masked_row=masked_row))
    for bias in ("dense", "relative"):
        cases.append(Case("sparse", 2, 4, 1, 150, 130, 64, 64, "bf16", kernel=row, bias=bias, softcap=4.0))
    for mask in ("sparse", "window", "random"):
        cases.append(Case(mask, 1, 1, 1, 1000, 1000, 64, 64, kernel=row))
        cases.append(Case(mask, 1, 2, 2, 100, 100, 64, 64, kernel=row, encoded=(300, 200)))
    return cases


def fuzz(count: int, seed: int) -> list[Case]:
    """Random combinations of everything that may be combined."""
    r = random.Random(seed)
    cases = []
    while len(cases) < count:
        kernel = r.choice((Kernel.BLOCK_SM80, Kernel.BLOCK_SM80, Kernel.BLOCK_SM80, Kernel.ROW_WISE))
        block = kernel == Kernel.BLOCK_SM80
        dtype = r.choice(("f16", "bf16", "f16", "bf16", "f32"))
        dim = r.choice(DIMS)
        kv_heads = r.randint(1, 3)
        seq_q = r.choice((1, 7, 63, 64, 65, 127, 130, 257, r.randint(1, 600)))
        seq_kv = r.choice((seq_q, seq_q, r.choice((1, 7, 63, 65, 128, 257, r.randint(1, 600)))))
        layout = r.choice(("BHSD", "BSHD", "packed"))
        tile = r.choice(TILES)
        masked_row = r.choice(tuple(MaskedRow))
        second = masked_row in (MaskedRow.MEAN, MaskedRow.SCORES)
        count_splits = r.choice((1, 1, 2, 3, 7)) if block and not second else 1
        modified = r.random() < 0.5
        cases.append(
            Case(
                mask=r.choice(MASKS), batch=r.randint(1, 3), heads=kv_heads * r.randint(1, 3), kv_heads=kv_heads,
                seq_q=seq_q, seq_kv=seq_q if layout == "packed" else seq_kv, dim=dim,
                v_dim=dim if layout == "packed" or r.random() < 0.6 else r.choice(DIMS), dtype=dtype, layout=layout,
                tile=tile, order=BitmapOrder(int(block and r.random() < 0.5)),
                encoded=(seq_q + r.randint(0, 200), max(seq_q, seq_kv) + r.randint(0, 200)) if r.random() < 0.2
                else None,
                scale=r.choice((None, None, 0.2, -0.1)),
                softcap=r.choice((0.0, 3.0)) if modified else 0.0,
                bias=r.choice(("none", "dense", "dense_bh", "dense_inf", "dense_lowest", "relative", "relative_1"))
                if modified
                else "none",
                kv=r.choice(("none", "mask", "length")) if modified else "none",
                masked_row=masked_row, kernel=kernel, f32_math=r.choice(tuple(F32Math)), splits=count_splits,
                split_rows=r.randint(0, 3),
            )
        )  # fmt: skip
    return cases


def hopper_tiles(widest: int) -> tuple[tuple[int, int], ...]:
    """The tiles of the sm_90 instances for the larger head size: 64 times the bands of a group, keys of a tile."""
    if widest <= 64:
        return ((128, 64), (192, 64))
    return ((128, 64), (128, 128)) if widest <= 128 else ((128, 64),)


def hopper() -> list[Case]:
    """The sm_90 kernel: masks, head sizes, ragged and unequal lengths, layouts, GQA, run-time lengths, empty rows."""
    kernel = Kernel.BLOCK_SM90
    cases = []
    masks, layouts = _cycle(MASKS), _cycle(("BHSD", "BSHD", "packed"))
    for dtype, dim in itertools.product(("f16", "bf16"), DIMS):
        for tile, seq in itertools.product(hopper_tiles(dim), (65, 200, 1000)):
            cases.append(Case(next(masks), 2, 4, 2, seq, seq, dim, dim, dtype, next(layouts), tile, kernel=kernel))
    for (dim, tile), mask in itertools.product(((64, (128, 64)), (64, (192, 64)), (128, (128, 128))), MASKS):
        for seq in (1, 63, 257, 2049):
            cases.append(Case(mask, 1, 2, 1, seq, seq, dim, dim, "f16", tile=tile, kernel=kernel))
        cases.append(Case(mask, 1, 2, 2, 130, 333, dim, dim - 16, "bf16", "BSHD", tile, kernel=kernel))
        cases.append(Case(mask, 3, 2, 2, 300, 300, dim, dim, "f16", tile=tile, kernel=kernel, kv="length"))
        cases.append(Case(mask, 1, 2, 2, 200, 150, dim, dim, "f16", tile=tile, kernel=kernel, masked_row=MaskedRow.NAN))
        cases.append(Case(mask, 1, 2, 2, 130, 150, dim, dim, tile=tile, kernel=kernel, encoded=(513, 700)))
    for dtype, dim, mask in itertools.product(("f16", "bf16"), (32, 64), ("all", "random", "empty_rows", "per_head")):
        cases.append(Case(mask, 1, 2, 1, 1600, 1700, dim, dim, dtype, tile=(192, 64), kernel=kernel))  # long lists
    # What a sink leaves for the other keys must keep its digits, and a sink behind them raises the running maxima.
    for dtype, dim, sink in itertools.product(("f16", "bf16"), (32, 64, 128), ("first", "last")):
        for tile, mask in itertools.product(hopper_tiles(dim), ("causal", "longformer", "bigbird")):
            cases.append(Case(mask, 1, 2, 2, 700, 1000, dim, dim, dtype, tile=tile, kernel=kernel, sink=sink))
    for mask, (dim, v_dim) in itertools.product(MASKS, ((64, 128), (128, 64), (256, 192))):
        for tile in hopper_tiles(max(dim, v_dim)):
            cases.append(Case(mask, 2, 2, 1, 700, 700, dim, v_dim, "bf16", tile=tile, kernel=kernel))
    return cases


def hopper_fuzz(count: int, seed: int) -> list[Case]:
    """Random combinations of everything that the sm_90 kernel runs."""
    r = random.Random(seed)
    cases = []
    while len(cases) < count:
        layout = r.choice(("BHSD", "BSHD", "packed"))
        dim = r.choice(DIMS)
        v_dim = dim if layout == "packed" or r.random() < 0.6 else r.choice(DIMS)
        kv_heads = r.randint(1, 3)
        seq_q = r.choice((1, 7, 63, 64, 65, 128, 193, 257, r.randint(1, 600), r.randint(1, 1500)))
        seq_kv = seq_q if layout == "packed" or r.random() < 0.6 else r.choice((1, 65, 128, 257, r.randint(1, 1500)))
        cases.append(
            Case(
                mask=r.choice(MASKS), batch=r.randint(1, 3), heads=kv_heads * r.randint(1, 4), kv_heads=kv_heads,
                seq_q=seq_q, seq_kv=seq_kv, dim=dim, v_dim=v_dim, dtype=r.choice(("f16", "bf16")), layout=layout,
                tile=r.choice(hopper_tiles(max(dim, v_dim))), kernel=Kernel.BLOCK_SM90,
                scale=r.choice((None, None, 0.2)),
                encoded=(seq_q + r.randint(0, 200), seq_kv + r.randint(0, 200)) if r.random() < 0.2 else None,
                kv=r.choice(("none", "none", "length")), masked_row=r.choice((MaskedRow.ZERO, MaskedRow.NAN)),
            )
        )  # fmt: skip
    return cases


GROUPS = {
    "exact": exact,
    "shapes": shapes,
    "modifiers": modifiers,
    "fp32": fp32,
    "splits": splits,
    "row_wise": row_wise,
    "hopper": hopper,
}


def every_instance() -> list[Case]:
    """Small cases that reach every compiled instance, for compute-sanitizer (S <= 257)."""
    cases = []
    for dtype in ("f16", "bf16"):
        for dim, tiles in EXACT_TILES.items():
            for i, tile in enumerate(tiles):
                order = BitmapOrder(i % 2)
                cases.append(Case("causal", 1, 2, 1, 193, 193, dim, dim, dtype, "BSHD", tile, order, splits=1 + i % 2))
        for dim in (64, 128, 256):
            cases.append(
                Case(
                    "empty_rows",
                    1,
                    2,
                    1,
                    70,
                    100,
                    dim,
                    dim,
                    dtype,
                    bias="dense",
                    kv="mask",
                    masked_row=MaskedRow.SCORES,
                )
            )
    for math, dim in itertools.product((F32Math.FFMA, F32Math.TF32X3), (64, 128, 256)):
        cases.append(Case("empty_rows", 1, 1, 1, 70, 70, dim, dim, "f32", f32_math=math, masked_row=MaskedRow.MEAN))
    # Row-wise: the plain form, and the one with modifiers.
    for dtype, dim, masked_row in itertools.product(
        ("f16", "bf16", "f32"), (32, 64, 128, 256), (MaskedRow.ZERO, MaskedRow.SCORES)
    ):
        row = Kernel.ROW_WISE
        cases.append(Case("empty_rows", 1, 1, 1, 70, 70, dim, dim, dtype, kernel=row, masked_row=masked_row))
    cases.append(Case("bigbird", 1, 1, 1, 257, 257, 64, 64, "f32", splits=3, split_rows=1))
    return cases


def every_hopper_instance() -> list[Case]:
    """Small cases that reach every sm_90 instance, for compute-sanitizer."""
    kernel = Kernel.BLOCK_SM90
    cases = []
    for dtype, dim in itertools.product(("f16", "bf16"), (32, 64, 96, 128, 192, 256)):
        for tile in hopper_tiles(dim):
            cases.append(Case("longformer", 1, 2, 1, 1000, 1000, dim, dim, dtype, "BSHD", tile, kernel=kernel))
        if dim <= 64:  # long lists have instances of their own
            cases.append(Case("random", 1, 1, 1, 193, 1600, dim, dim, dtype, "BSHD", (192, 64), kernel=kernel))
    return cases
