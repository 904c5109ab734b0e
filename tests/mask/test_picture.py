import builtins

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.mask import encode, save_picture, text_picture
from stof_onnx.mask.picture import shares
from stof_onnx.pictures import draw_masks

from tests.mask.dense_masks import matrices


def test_text_of_a_causal_mask():
    mask = encode(np.tril(np.ones((64, 64), bool)))
    assert text_picture(mask, 8) == "▓░      \n██▓░    \n████▓░  \n██████▓░"
    assert text_picture(mask, 4, ascii_only=True) == "+.  \n##+."


@given(matrices(), st.integers(1, 40), st.integers(1, 40))
def test_shares_add_up_and_only_pure_cells_are_blank_or_solid(allowed, height, width):
    mask = encode(allowed)
    share = shares(mask, height, width)
    rows = np.arange(share.shape[0] + 1) * mask.s_q // share.shape[0]
    cols = np.arange(share.shape[1] + 1) * mask.s_kv // share.shape[1]
    for i, j in np.ndindex(share.shape):
        assert share[i, j] == allowed[rows[i] : rows[i + 1], cols[j] : cols[j + 1]].mean()
    lines = text_picture(mask, width).split("\n")
    assert all(len(line) <= width for line in lines)


def test_large_masks_are_drawn_from_tiles():
    size = 2500
    allowed = np.abs(np.arange(size)[:, None] - np.arange(size)) <= 100
    share = shares(encode(allowed), 10, 10)
    starts = np.arange(10) * 40 // 10 * 64
    for i, j in np.ndindex(10, 10):
        assert np.isclose(share[i, j], allowed[starts[i] : starts[i] + 256, starts[j] : starts[j] + 256].mean())


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    save_picture(encode(np.tril(np.ones((100, 100), bool))), path, title="causal")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(StofError, match="can not write"):
        save_picture(encode(np.ones((8, 8), bool)), tmp_path / "none" / "mask.png")


def test_png_without_matplotlib(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(StofError, match="need matplotlib"):
        save_picture(encode(np.ones((8, 8), bool)), tmp_path / "mask.png")
    with pytest.raises(StofError, match="need matplotlib"):
        draw_masks([], tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
