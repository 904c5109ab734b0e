from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.mask import ONNX_INPUTS, EncodedMask, encode

from tests.mask.dense_masks import matrices, tables, tile_sizes


@given(tables(), tile_sizes, tile_sizes)
def test_onnx_arrays_round_trip(table, tile_m, tile_n):
    mask = encode(table, tile_m, tile_n)
    arrays = mask.to_onnx_arrays()
    assert list(arrays) == list(ONNX_INPUTS)
    for array in arrays.values():
        assert array.dtype == np.int32 and array.size > 0
    words = arrays["bitmap"].astype(np.int64)
    low, high = words[..., 0] & 0xFFFFFFFF, words[..., 1] & 0xFFFFFFFF
    entries = slice(0, mask.n_part)
    assert (low[entries] == (mask.bitmap & 0xFFFFFFFF).astype(np.int64)).all()
    assert (high[entries] == (mask.bitmap >> np.uint64(32)).astype(np.int64)).all()
    assert EncodedMask.from_onnx_arrays(arrays, mask.s_q, mask.s_kv, tile_m, tile_n) == mask


@given(matrices(), st.data())
def test_equality_is_that_of_the_content(allowed, data):
    mask, again = encode(allowed), encode(allowed.copy())
    assert mask == again and hash(mask) == hash(again) and mask.digest == again.digest
    other = allowed.copy()
    q, k = (data.draw(st.integers(0, n - 1)) for n in allowed.shape)
    other[q, k] ^= True
    assert encode(other) != mask
    assert encode(allowed, 64, 32) != mask
    assert mask != "mask"


def test_size_is_part_of_the_content():
    assert encode(np.ones((60, 60), bool)) != encode(np.ones((61, 60), bool))


def test_arrays_are_read_only():
    mask = encode(np.tril(np.ones((100, 100), bool)))
    for name in ONNX_INPUTS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(mask, name)[...] = 0


def _sample() -> EncodedMask:
    """Two masks over 3 x 4 tiles with full and part tiles, ragged on both sides."""
    rng = np.random.default_rng()
    masks = rng.random((1, 2, 70, 110)) < 0.5
    masks[:, 0, 0:32, 32:64] = True
    masks[:, 0, 64:, :32] = True
    masks[:, 1, 32:64, :96] = True
    masks[:, 1, 32:64, 32:64] = False
    return encode(masks, 32, 32)


def _set(name, index, value):
    def corrupt(mask):
        array = getattr(mask, name).copy()
        array[index] = value
        return replace(mask, **{name: array})

    return corrupt


def _with(name, change):
    return lambda mask: replace(mask, **{name: change(getattr(mask, name))})


CORRUPTIONS = {
    "zero size": (lambda m: replace(m, s_q=0), "s_q is 0"),
    "size of another type": (lambda m: replace(m, s_kv=110.0), "s_kv is 110.0"),
    "size that needs more rows": (lambda m: replace(m, s_q=200), "full_row_ptr has shape"),
    "size that leaves bits outside": (lambda m: replace(m, s_kv=m.s_kv - 1), "bits outside"),
    "tile not a multiple of 8": (lambda m: replace(m, tile_m=30), "tile_m is 30"),
    "tile of another shape": (lambda m: replace(m, tile_n=40), "bitmap has shape"),
    "list instead of array": (_with("row_order", lambda a: a.tolist()), "row_order is list"),
    "int64 pointers": (_with("full_row_ptr", lambda a: a.astype(np.int64)), "full_row_ptr is int64"),
    "signed bitmap": (_with("bitmap", lambda a: a.astype(np.int64)), "bitmap is int64"),
    "pointers of one mask": (_with("part_row_ptr", lambda a: a[:1]), "part_row_ptr has shape"),
    "flat pointers": (_with("full_row_ptr", np.ravel), "full_row_ptr has shape"),
    "columns with two axes": (_with("part_col_idx", lambda a: a[:, None]), "part_col_idx has shape"),
    "bitmap too short": (_with("bitmap", lambda a: a[:-1]), "bitmap has shape"),
    "first pointer": (_set("full_row_ptr", (0, 0), 1), "starts at 1"),
    "falling pointers": (_set("part_row_ptr", (0, 1), 9), "falls"),
    "negative pointer": (_set("full_row_ptr", (0, 1), -1), "falls"),
    "gap between masks": (_set("full_row_ptr", (1, 0), 1), "does not start where"),
    "last pointer": (_set("part_row_ptr", (1, -1), 100), "ends at 100"),
    "negative column": (_set("full_col_idx", 0, -1), "full_col_idx holds -1"),
    "column past the end": (_set("part_col_idx", 0, 4), "part_col_idx holds"),
    "columns not ascending": (
        _with("part_col_idx", lambda a: a[[1, 0, *range(2, len(a))]]),
        "part_col_idx is not strictly ascending",
    ),
    "column twice": (_set("part_col_idx", 1, 0), "part_col_idx is not strictly ascending"),
    "full and part": (_set("full_col_idx", 0, 0), "both as full and as part"),
    "bits outside the rows": (_set("bitmap", (-1, 1, 0), 1), "bits outside"),
    "empty part tile": (_set("bitmap", 0, 0), "part tile 0 is empty"),
    "full part tile": (_set("bitmap", 0, 2**64 - 1), "part tile 0 is full"),
    "row twice": (_set("row_order", (1, slice(None)), 1), "row_order is not a permutation"),
    "row past the end": (_set("row_order", (0, 0), 3), "row_order is not a permutation"),
    "flat index": (_with("mask_index", np.ravel), "mask_index has shape"),
    "no index": (_with("mask_index", lambda a: a[:0]), "mask_index has shape"),
    "index past the end": (_set("mask_index", (0, 0), 2), "mask_index holds"),
    "negative index": (_set("mask_index", (0, 1), -1), "mask_index holds"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_arrays_are_named(name):
    corrupt, said = CORRUPTIONS[name]
    mask = _sample()
    mask.validate()
    with pytest.raises(StofError) as error:
        corrupt(mask).validate("layer 3")
    assert said in error.value.what and error.value.where == "layer 3" and error.value.advice


def test_full_part_tile_at_the_ragged_edge():
    """Only the elements in range decide, so this tile is full although not all its bits are set."""
    ragged = encode(np.arange(20)[None, :] < 19)
    bitmap = ragged.bitmap.copy()
    bitmap[0, 0] = [0xFF, 0xFF, 0x0F, 0, 0, 0, 0, 0]
    with pytest.raises(StofError, match="part tile 0 is full"):
        replace(ragged, bitmap=bitmap).validate()


@given(st.data())
def test_no_corruption_reaches_the_decoder_out_of_bounds(data):
    """Whatever one array entry becomes, validate() rejects it or decoding stays within the arrays."""
    from stof_onnx.mask import decode, statistics

    mask = _sample()
    name = data.draw(st.sampled_from(ONNX_INPUTS))
    array = getattr(mask, name).copy()
    at = data.draw(st.integers(0, array.size - 1))
    info = np.iinfo(array.dtype)
    array.flat[at] = data.draw(st.integers(int(info.min), int(info.max)) | st.integers(0, 5))
    changed = replace(mask, **{name: array})
    try:
        changed.validate()
    except StofError:
        return
    assert decode(changed).shape == (1, 2, 70, 110)
    statistics(changed)


def test_from_onnx_arrays_rejects_what_it_can_not_read():
    mask = _sample()
    arrays = mask.to_onnx_arrays()
    sizes = (mask.s_q, mask.s_kv, mask.tile_m, mask.tile_n)

    def said(**changes):
        changed = {name: a for name, a in {**arrays, **changes}.items() if a is not None}
        with pytest.raises(StofError) as error:
            EncodedMask.from_onnx_arrays(changed, *sizes, where="node")
        return str(error.value)

    assert "row_order" in said(row_order=None)
    assert "bitmap is int64" in said(bitmap=arrays["bitmap"].astype(np.int64))
    assert "expected [n_part" in said(bitmap=arrays["bitmap"][..., :1])
    assert "holds" in said(full_col_idx=arrays["full_col_idx"][:-1])

    empty = encode(np.zeros((20, 20), bool)).to_onnx_arrays()
    for name, dummy in (("part_col_idx", np.ones(1, np.int32)), ("full_col_idx", np.zeros(2, np.int32))):
        with pytest.raises(StofError, match=name):
            EncodedMask.from_onnx_arrays({**empty, name: dummy}, 20, 20, 64, 64)
