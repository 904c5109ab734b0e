"""The instance tables here and in cuda/src are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stof_onnx.kernels.configs import KernelConfig, KernelSite
from stof_onnx.kernels.instances import SM80_EXACT, SM80_F32, SM80_GENERAL, SM90_DIMS, all_instances, instance_of

SOURCES = Path(__file__).resolve().parents[2] / "cuda" / "src"


def numbers(pattern: str, file: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, m.groups())) for m in re.finditer(pattern, (SOURCES / file).read_text())]


def site(dim: int, dtype: str = "fp16", softcap: float = 0.0) -> KernelSite:
    return KernelSite(1, 1, dim, dim, dtype, 0.125, softcap)


def test_exact_instances():
    found = numbers(r"Exact<T, (\d+), (\d+), (\d+), (\d+), \d+, \w+, (\d+)>", "block_exact.cuh")
    assert {(dim, 16 * bands * warps, cols): blocks for dim, bands, cols, warps, blocks in found} == SM80_EXACT


def test_general_instances():
    found = numbers(r"General<__half, (\d+), (\d+)>", "block_general_half.cu")
    assert {dim: (64, 32, blocks) for dim, blocks in found} == SM80_GENERAL


def test_f32_instances():
    found = numbers(r"Ffma<(\d+), (\d+), \d+, (\d+)>", "block_f32.cu")
    assert {dim: (16 * warps, 32, blocks) for dim, warps, blocks in found} == SM80_F32


def test_sm90_head_sizes():
    found = numbers(r"if \(dim <= (\d+)\) return launch_dim", "attention_sm90.cu")
    assert {dim for (dim,) in found} | {256} == set(SM90_DIMS)


@pytest.mark.parametrize(
    ("config", "kernel_site", "key"),
    [
        (KernelConfig("block_sm80", 64, 64), site(32), "block_sm80 d32 64x64"),
        (KernelConfig("block_sm80", 64, 32), site(32), "block_sm80 d64 64x32"),
        (KernelConfig("block_sm80", 128, 64), site(80), "block_sm80 d128 128x64"),
        (KernelConfig("block_sm80", 64, 64), site(160), "block_sm80 general d256 64x32"),
        (KernelConfig("block_sm80", 64, 64), site(64, softcap=5.0), "block_sm80 general d64 64x32"),
        (KernelConfig("block_sm80", 64, 64), site(72, "fp32"), "block_sm80 f32 d128 64x32"),
        (KernelConfig("block_sm90", 192, 64), site(64, "bf16"), "block_sm90 d64 192x64"),
        (KernelConfig("row_wise", 64, 64), site(40, "bf16"), "row_wise half d64"),
    ],
)
def test_the_smallest_instance_that_fits(config, kernel_site, key):
    assert instance_of(config, kernel_site).key == key


def test_names_are_unique():
    keys = [i.key for i in all_instances()]
    assert len(keys) == len(set(keys)) > 30
