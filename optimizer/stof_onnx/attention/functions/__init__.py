"""The model-local functions of the portable file: attention bodies and mask decoding in standard operators."""

from stof_onnx.attention.functions.attention import ATTRIBUTES, AttentionVariant, attention_function
from stof_onnx.attention.functions.builder import DOMAIN
from stof_onnx.attention.functions.decode import DECODE_INPUTS, Geometry
from stof_onnx.attention.functions.forms import Form
from stof_onnx.attention.functions.mask import MaskVariant, mask_function

__all__ = [
    "ATTRIBUTES",
    "DECODE_INPUTS",
    "DOMAIN",
    "AttentionVariant",
    "Form",
    "Geometry",
    "MaskVariant",
    "attention_function",
    "mask_function",
]
