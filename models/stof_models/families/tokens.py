"""Models of one token sequence: input_ids (and attention_mask) to hidden states."""

from __future__ import annotations

from typing import Any

import torch

from stof_models.families.base import (
    BATCH,
    SEQUENCE,
    Built,
    mask_argument,
    mask_context,
    padding,
    self_mask,
    seq_dim,
    tokens,
)
from stof_models.info import SiteInfo
from stof_models.options import NATIVE, ExportOptions


class TokenModel(torch.nn.Module):
    """input_ids [B, S] (and attention_mask [B, S]) to hidden states [B, S, hidden]."""

    def __init__(
        self, model: torch.nn.Module, masks: dict[str, torch.nn.Module], *, ones: bool, positions: bool
    ) -> None:
        super().__init__()
        self.model, self.masks = model, torch.nn.ModuleDict(masks)
        self.ones, self.positions = ones, positions

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        # Without a mask, decoders look for packed sequences with aten::diff, which TorchScript export does not know:
        # its users pass a mask of ones.
        mask: Any = torch.ones_like(input_ids) if attention_mask is None and self.ones else attention_mask
        if len(self.masks):
            seq = input_ids.shape[1]
            by_type = {name: build(seq, seq, attention_mask) for name, build in self.masks.items()}
            mask = by_type["full_attention"] if len(by_type) == 1 else by_type
        arguments = _no_cache(self.model)
        if self.positions:
            # With a batch of 1 in them, a dynamic batch makes opset 23's RotaryEmbedding invalid.
            batch, seq = input_ids.shape
            arguments["position_ids"] = torch.arange(seq)[None].expand(batch, seq)
        return self.model(input_ids=input_ids, attention_mask=mask, **arguments).last_hidden_state


def _no_cache(model: torch.nn.Module) -> dict[str, Any]:
    return {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}


def build_tokens(
    options: ExportOptions,
    model: torch.nn.Module,
    *,
    decoder: bool,
    kv_heads: int = 0,
    layer_bands: list[tuple[str, int]] | None = None,
    bias: str = "none",
    softcap: float = 0.0,
    rope: bool = False,
) -> Built:
    """Wraps a finished `model`. `layer_bands` names the local window of each layer (("", 0) where it is global)."""
    longest = options.longest
    bands = layer_bands or [("", 0)] * options.layers
    specs = [self_mask(options, longest, decoder=decoder, band=band) for band in bands]
    masks: dict[str, torch.nn.Module] = {}
    extra: dict[str, Any] = {}
    if options.mask != NATIVE:
        full = next((s for s, band in zip(specs, bands, strict=True) if not band[0]), specs[0])
        local = next((s for s, band in zip(specs, bands, strict=True) if band[0]), full)
        assert full is not None and local is not None
        if options.mask_style == "function":
            extra["context"] = mask_context(options, {"full": full, "local": local})
        else:
            masks["full_attention"] = mask_argument(options, full)
            if local is not full:
                masks["sliding_attention"] = mask_argument(options, local)
    inputs = [tokens("input_ids", options, SEQUENCE, options.seq)]
    if options.padding:
        inputs.append(padding("attention_mask", options, SEQUENCE, options.seq))
    seq = seq_dim(options, SEQUENCE, options.seq)
    sites = tuple(
        SiteInfo(
            name=f"layer.{i}.self",
            heads=options.heads,
            kv_heads=kv_heads or options.heads,
            head_dim=options.head_dim,
            seq_q=seq,
            seq_kv=seq,
            mask=specs[i],
            padding=options.padding,
            bias=bias,
            softcap=softcap,
        )
        for i in range(options.layers)
    )
    return Built(
        TokenModel(
            model,
            masks,
            ones=decoder and options.exporter == "torchscript",
            positions=rope and options.opset >= 23 and options.dynamic != "none",
        ).eval(),
        tuple(inputs),
        ("last_hidden_state",),
        sites,
        {BATCH: options.batch, SEQUENCE: options.seq},
        {SEQUENCE: longest},
        **extra,
    )
