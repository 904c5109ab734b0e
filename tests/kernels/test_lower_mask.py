from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.kernels.fragments import fragment_words
from stof_onnx.kernels.lower_mask import MaskConfig, lower_mask
from stof_onnx.mask import EncodedMask, decode, encode

from tests.mask.dense_masks import tables, tile_kinds

weights = st.floats(0.1, 10)


@given(tables(max_size=200), st.sampled_from([16, 64, 128, 192]), st.sampled_from([64, 128]), weights, weights)
def test_lowered_arrays_hold_the_dense_mask(table, tile_m, tile_n, full_weight, part_weight):
    config = MaskConfig(tile_m, tile_n, full_weight=full_weight, part_weight=part_weight)
    lowered = lower_mask(encode(table), config)
    arrays = lowered.to_onnx_arrays()
    attributes = lowered.attributes()
    again = EncodedMask.from_onnx_arrays(
        arrays,
        attributes["mask_seq_q"],
        attributes["mask_seq_kv"],
        attributes["tile_m"],
        attributes["tile_n"],
    )
    assert (np.broadcast_to(decode(again), table.shape) == table).all()
    assert not attributes["mask_fragment_order"]
    index = np.broadcast_to(again.mask_index, table.shape[:2])
    for b, h in np.ndindex(*table.shape[:2]):
        kinds = tile_kinds(table[b, h], tile_m, tile_n)
        work = full_weight * (kinds == "full").sum(axis=1) + part_weight * (kinds == "part").sum(axis=1)
        ordered = work[again.row_order[index[b, h]]]
        assert (ordered[1:] <= ordered[:-1]).all()


@given(tables(max_size=200), st.sampled_from([16, 64, 128]), st.sampled_from([32, 64, 128]))
def test_fragments_take_the_place_of_the_bitmap(table, tile_m, tile_n):
    plain = lower_mask(encode(table), MaskConfig(tile_m, tile_n))
    lowered = lower_mask(encode(table), MaskConfig(tile_m, tile_n, fragment_order=True))
    assert lowered.attributes() == {**plain.attributes(), "mask_fragment_order": 1}
    mine, theirs = lowered.to_onnx_arrays(), plain.to_onnx_arrays()
    for name in mine:
        if name != "bitmap":
            assert (mine[name] == theirs[name]).all()
    assert mine["bitmap"].dtype == np.int32 and mine["bitmap"].nbytes == theirs["bitmap"].nbytes
    assert (mine["bitmap"].view(np.uint32)[: plain.mask.n_part] == fragment_words(plain.mask.bitmap)).all()


def test_arrays_are_validated_first():
    mask = encode(np.tril(np.ones((200, 200), bool)))
    broken = replace(mask, part_col_idx=np.array(mask.part_col_idx) + 1)
    with pytest.raises(StofError, match="layer 7"):
        lower_mask(broken, MaskConfig(128, 64), "layer 7")


def test_same_tiles_keep_the_arrays():
    mask = encode(np.tril(np.ones((200, 200), bool)))
    assert lower_mask(mask, MaskConfig(64, 64)).mask == mask
