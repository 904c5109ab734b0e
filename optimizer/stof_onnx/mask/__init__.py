"""Boolean attention masks as BSR tile lists and 8x8 bitmaps (docs/mask_format.md). numpy only."""

from stof_onnx.mask.decode import decode, decode_band, decode_one
from stof_onnx.mask.encode import RowBands, encode, encode_bands, encode_packed
from stof_onnx.mask.encoded import FORMAT_VERSION, ONNX_INPUTS, EncodedMask
from stof_onnx.mask.picture import save_picture, text_picture
from stof_onnx.mask.prefix import PrefixBreak, first_prefix_break, square_sizes
from stof_onnx.mask.retile import leading_submatrix, retile
from stof_onnx.mask.statistics import MaskStats, keys_per_row, rows_without_keys, statistics

__all__ = [
    "FORMAT_VERSION",
    "ONNX_INPUTS",
    "EncodedMask",
    "MaskStats",
    "PrefixBreak",
    "RowBands",
    "decode",
    "decode_band",
    "decode_one",
    "encode",
    "encode_bands",
    "encode_packed",
    "first_prefix_break",
    "keys_per_row",
    "leading_submatrix",
    "retile",
    "rows_without_keys",
    "save_picture",
    "square_sizes",
    "statistics",
    "text_picture",
]
