"""ViT (whole-image attention) and Swin (shifted windows with a relative position bias)."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import SwinConfig, SwinModel, ViTConfig, ViTModel

from stof_models.errors import ExportError
from stof_models.families.base import (
    BATCH,
    NUMPY_DTYPES,
    Built,
    Family,
    batch_dim,
    finish,
    mask_argument,
    mask_context,
    self_mask,
    with_attention,
)
from stof_models.info import InputInfo, SiteInfo
from stof_models.options import ExportOptions

PATCH = 2  # pixels
SWIN_WINDOW = 4  # patches a side
CHANNELS = 3


class ImageModel(torch.nn.Module):
    """pixel_values [B, 3, side, side] to hidden states."""

    def __init__(self, model: torch.nn.Module, mask: torch.nn.Module | None, seq: int) -> None:
        super().__init__()
        self.model, self.mask, self.seq = model, mask, seq

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        arguments: dict[str, Any] = {}
        if self.mask is not None:
            arguments["attention_mask"] = self.mask(self.seq, self.seq, None)
        return self.model(pixel_values=pixel_values, **arguments).last_hidden_state


def _vit(options: ExportOptions) -> Built:
    """`seq` patches, which must be a square; attention sees one token more (the class token)."""
    side = _side(options.seq)
    seq = options.seq + 1
    config = ViTConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=options.intermediate or 4 * options.hidden,
        image_size=side * PATCH,
        patch_size=PATCH,
        num_channels=CHANNELS,
    )
    mask = self_mask(options, seq, decoder=False)
    argument, context = None, {}
    if mask is not None and options.mask_style == "function":
        context = {"context": mask_context(options, {"full": mask})}
    elif mask is not None:
        argument = mask_argument(options, mask)
    model = finish(ViTModel(with_attention(config, options), add_pooling_layer=False), options)
    sites = tuple(
        SiteInfo(f"layer.{i}.self", options.heads, options.heads, options.head_dim, seq, seq, mask)
        for i in range(options.layers)
    )
    return _image(options, ImageModel(model, argument, seq), side, sites, **context)


def _swin(options: ExportOptions) -> Built:
    """`seq` patches, a square of whole windows; every second layer is shifted."""
    side = _side(options.seq)
    if side % SWIN_WINDOW:
        raise ExportError(f"swin needs whole windows: {side} patches a side is not a multiple of {SWIN_WINDOW}")
    config = SwinConfig(
        image_size=side * PATCH,
        patch_size=PATCH,
        num_channels=CHANNELS,
        embed_dim=options.hidden,
        depths=[options.layers],
        num_heads=[options.heads],
        window_size=SWIN_WINDOW,
        mlp_ratio=(options.intermediate or 2 * options.hidden) / options.hidden,
    )
    model = finish(SwinModel(with_attention(config, options), add_pooling_layer=False), options)
    tokens = SWIN_WINDOW * SWIN_WINDOW
    windows = (side // SWIN_WINDOW) ** 2
    sites = tuple(
        SiteInfo(
            f"layer.{i}.self",
            options.heads,
            options.heads,
            options.head_dim,
            tokens,
            tokens,
            bias="dense",
            batch_factor=windows,
        )
        for i in range(options.layers)
    )
    return _image(options, ImageModel(model, None, tokens), side, sites)


def _image(
    options: ExportOptions, module: torch.nn.Module, side: int, sites: tuple[SiteInfo, ...], **context: Any
) -> Built:
    pixels = InputInfo(
        "pixel_values", NUMPY_DTYPES[options.dtype], (batch_dim(options), CHANNELS, side * PATCH, side * PATCH)
    )
    return Built(module.eval(), (pixels,), ("last_hidden_state",), sites, {BATCH: options.batch}, {}, **context)


def _side(patches: int) -> int:
    side = math.isqrt(patches)
    if side * side != patches:
        raise ExportError(f"images are square: --seq {patches} (patches) should be {side**2} or {(side + 1) ** 2}")
    return side


FAMILIES = (
    Family("vit", _vit, padding=False, dynamic=("none", "batch")),
    Family("swin", _swin, masks=False, padding=False, dynamic=("none", "batch")),
)
