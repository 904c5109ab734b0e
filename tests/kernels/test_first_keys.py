"""Tiles in which queries see their first key, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from stof_onnx.kernels.first_keys import first_key_tiles
from stof_onnx.mask import encode, encode_bands, retile
from stof_onnx.mask.sources import causal, window


def brute_force(allowed: np.ndarray, tile_m: int, tile_n: int) -> list[float]:
    found = []
    for top in range(0, len(allowed), tile_m):
        counts = []
        for warp in range(top, top + tile_m, 16):
            rows = [row for row in allowed[warp : warp + 16] if row.any()]
            counts.append(len({int(np.flatnonzero(row)[0]) // tile_n for row in rows}))
        found.append(float(np.mean(counts)))
    return found


@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (64, 32)])
@pytest.mark.parametrize("density", [0.002, 0.01, 0.2])
def test_random_elements(tile, density):
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    allowed = np.random.default_rng(seed).random((2, 500, 700)) < density
    mask = retile(encode(allowed[None]), *tile)
    found = first_key_tiles(mask)
    for number, index in zip(mask.mask_index.ravel(), range(2), strict=True):
        padded = np.zeros((512, 704), bool)
        padded[:500, :700] = allowed[index]
        assert found[number].tolist() == brute_force(padded, *tile)


def test_one_tile_shows_all_queries_a_key():
    assert first_key_tiles(encode_bands(causal(300, 300), 300, 300)).tolist() == [[1.0] * 5]
    strided = np.zeros((256, 256), bool)
    strided[:, ::64] = True
    assert first_key_tiles(encode(strided[None, None])).tolist() == [[1.0] * 4]


def test_no_keys_no_tiles():
    nothing = np.zeros((128, 128), bool)
    nothing[64:, :] = True
    assert first_key_tiles(encode(nothing[None, None])).tolist() == [[0.0, 1.0]]
    assert first_key_tiles(encode_bands(window(64, 64, 0, 0), 64, 64)).tolist() == [[1.0]]
