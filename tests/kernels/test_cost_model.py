"""Properties of predicted times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from stof_onnx.kernels.cost_model import NAMES, Coefficients, Figures, predict_us, softer_max
from stof_onnx.kernels.instances import Instance
from stof_onnx.kernels.work import Sizes, Work

SIMPLE = Coefficients(
    launch=3.0, alone_full=1.0, alone_part=1.2, alone_item=2.0, shared_full=0.5, shared_part=0.6,
    shared_piece=0.3, alone_entry=0.1, shared_entry=0.1, alone_first=0.05, shared_first=0.05, sharpness=2.0,
    tail=0.5, io=0.2, join=2.5, join_bytes=0.3, join_piece=0.4, counter=1.5,
)  # fmt: skip
TINY = 1e-9
GPU = Figures(132, 50 << 20, 228 << 10)


def work(lengths: np.ndarray, heads: int, part: float = 0.3, resident: int = 4, **changes: object) -> Work:
    """Items of these lengths, in each head."""
    full, parts = lengths * (1 - part), lengths * part
    n = len(lengths)
    sizes = Sizes(heads, 1e4, heads * 3e4)
    instance = Instance("block_sm80", "test", 64, 64, 64, resident, 40_000)
    count = np.full(n, float(heads))
    none = np.zeros(n)
    made = Work(instance, sizes, count, full, parts, full, parts, none, none, np.ones(n), none > 0)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_softer_max():
    assert softer_max(1.0, 1.0, 2.0) == pytest.approx(2**0.5)
    assert softer_max(10.0, 1.0, 2.0) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_more_work_is_never_faster(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, int(rng.integers(1, 64))).astype(float)
    heads = int(rng.integers(1, 200))
    before = predict_us(work(lengths, heads), SIMPLE, GPU)
    longer = lengths.copy()
    longer[rng.integers(len(lengths))] += float(rng.integers(1, 50))
    assert predict_us(work(longer, heads), SIMPLE, GPU) >= before
    assert predict_us(work(np.append(lengths, 5.0), heads), SIMPLE, GPU) >= before * (1 - 1e-9)
    assert predict_us(work(lengths, 2 * heads), SIMPLE, GPU) >= before
    assert predict_us(work(lengths, heads, part=0.6), SIMPLE, GPU) >= before


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sharpness"])
def test_no_coefficient_makes_it_faster(name):
    lengths = np.array([3.0, 9.0, 40.0])
    w = work(lengths, 12, joined=4, joined_bytes=1e6, counter=True, first_keys=lengths / 4, entries=lengths)
    higher = replace(SIMPLE, **{name: 2 * getattr(SIMPLE, name)})
    assert predict_us(w, higher, GPU) >= predict_us(w, SIMPLE, GPU)


def test_one_item_takes_its_own_steps():
    c = replace(SIMPLE, shared_full=TINY, shared_part=TINY, shared_piece=TINY, io=TINY, tail=TINY)
    assert predict_us(work(np.array([10.0]), 1, part=0.0), c, GPU) == pytest.approx(3.0 + 10 * 1.0 + 2.0)


def test_rounds_over_the_multiprocessors():
    c = replace(SIMPLE, alone_full=TINY, alone_part=TINY, alone_item=TINY, io=TINY, tail=TINY)
    one, full, over = (predict_us(work(np.array([10.0]), n, part=0.0), c, GPU) for n in (1, 132, 133))
    assert one == pytest.approx(full)
    assert over - 3.0 == pytest.approx(2 * (full - 3.0))


def test_blocks_beyond_the_resident_ones_make_another_wave():
    c = replace(SIMPLE, shared_full=TINY, shared_part=TINY, shared_piece=TINY, io=TINY, tail=TINY)
    one, two = (predict_us(work(np.array([10.0]), n, part=0.0), c, GPU) - 3.0 for n in (4 * 132, 4 * 132 + 1))
    assert two == pytest.approx(2 * one)


def test_a_persistent_kernel_starts_once():
    c = replace(SIMPLE, shared_full=TINY, shared_part=TINY, shared_piece=TINY, io=TINY, tail=TINY)
    hopper = Instance("block_sm90", "test", 128, 64, 64, 1)
    one, two = (predict_us(work(np.array([10.0]), n, part=0.0, instance=hopper), c, GPU) for n in (132, 264))
    assert (one, two) == (pytest.approx(3.0 + 2.0 + 10.0), pytest.approx(3.0 + 2.0 + 2 * 10.0))


@pytest.mark.parametrize(("heads", "chunk", "steps"), [(1, 1, 4 + 2), (2, 2, 4 + 3 + 2), (2, 1, 4 + 2 + 3)])
def test_a_persistent_kernel_deals_in_turn(heads, chunk, steps):
    """Lists of 4, 3 and 2 on two multiprocessors: 4 3 2, or 4 4 3 3 2 2, or head by head 4 3 2 4 3 2."""
    c = replace(SIMPLE, shared_full=TINY, shared_part=TINY, shared_piece=TINY, io=TINY, tail=TINY, alone_entry=TINY)
    lengths = np.array([3.0, 4.0, 2.0])
    hopper = Instance("block_sm90", "test", 128, 64, 64, 1)
    w = work(lengths, heads, part=0.0, instance=hopper, entries=lengths, sizes=Sizes(heads, 1e6, 0.0))
    room = Figures(2, chunk * 1.01e6 / 0.48, 228 << 10)
    assert predict_us(w, replace(c, shared_entry=TINY), room) == pytest.approx(3.0 + 2.0 + steps)


def test_a_long_row_is_the_tail():
    short, long = np.full(63, 3.0), np.append(np.full(62, 3.0), 400.0)
    a, b = (predict_us(work(x, 12), SIMPLE, GPU) for x in (short, long))
    assert b > 400 > 4 * a


def test_much_work_takes_the_throughput():
    w = work(np.full(64, 20.0), 400, part=0.0)
    assert predict_us(w, SIMPLE, GPU) == pytest.approx(64 * 400 * (20 * 0.5 + 0.3) / 132, rel=0.2)


def test_less_shared_memory_holds_fewer_blocks():
    w = work(np.full(64, 20.0), 12)
    assert predict_us(w, SIMPLE, Figures(132, 50 << 20, 50_000)) > predict_us(w, SIMPLE, GPU)


def test_joining_and_counting_cost_what_they_cost():
    plain = work(np.full(64, 20.0), 12)
    base = predict_us(plain, SIMPLE, GPU)
    joined = predict_us(replace(plain, joined=4, joined_bytes=2e6), SIMPLE, GPU)
    assert joined - base == pytest.approx(2.5 + 2 * 0.3 + 4 * 0.4)
    assert predict_us(replace(plain, counter=True), SIMPLE, GPU) - base == pytest.approx(1.5)
