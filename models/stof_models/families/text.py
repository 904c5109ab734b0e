"""Models of one token sequence: BERT, ModernBERT, GPT-2, LLaMA, Mistral, Gemma 2 and 3, and T5's encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
)

from stof_models.families.base import (
    BATCH,
    SEQUENCE,
    Built,
    Family,
    finish,
    mask_argument,
    mask_context,
    padding,
    seq_dim,
    tokens,
    with_attention,
    zoo_mask,
)
from stof_models.info import SiteInfo
from stof_models.masks import MaskSpec, make_mask
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
    """Wraps `model`. `layer_bands` names the local window of each layer (("", 0) where it is global)."""
    longest = options.longest
    bands = layer_bands or [("", 0)] * options.layers
    local_band = next((band for band in bands if band[0]), None)
    all_local = all(band[0] for band in bands)
    kind = ("causal" if decoder else "none") if options.mask == NATIVE else options.mask

    def spec(band: tuple[str, int]) -> MaskSpec:
        if options.mask == NATIVE:
            return replace(make_mask(kind, longest), band=band[0], band_width=band[1])
        return zoo_mask(options, kind, longest, longest, decoder=decoder, band=band)

    masks: dict[str, torch.nn.Module] = {}
    extra: dict[str, Any] = {}
    if options.mask != NATIVE:
        full = spec(local_band if all_local and local_band else ("", 0))
        local = spec(local_band) if local_band and not all_local else None
        if options.mask_style == "function":
            extra["context"] = mask_context(options, full, local if not all_local else full)
        else:
            masks["full_attention"] = mask_argument(options, full)
            if local is not None:
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
            mask=spec(bands[i]) if kind != "none" or bands[i][0] else None,
            padding=options.padding,
            bias=bias,
            softcap=softcap,
        )
        for i in range(options.layers)
    )
    return Built(
        TokenModel(
            finish(model, options),
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


def _bert(options: ExportOptions) -> Built:
    config = BertConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=options.intermediate or 4 * options.hidden,
        max_position_embeddings=options.longest,
    )
    return build_tokens(options, BertModel(with_attention(config, options), add_pooling_layer=False), decoder=False)


def _gpt2(options: ExportOptions) -> Built:
    config = GPT2Config(
        vocab_size=options.vocab,
        n_embd=options.hidden,
        n_layer=options.layers,
        n_head=options.heads,
        n_inner=options.intermediate or 4 * options.hidden,
        n_positions=options.longest,
        bos_token_id=0,
        eos_token_id=0,
    )
    return build_tokens(options, GPT2Model(with_attention(config, options)), decoder=True)


def _llama(options: ExportOptions) -> Built:
    kv_heads = options.kv_heads or max(1, options.heads // 2)
    config = LlamaConfig(
        **_decoder_sizes(options, kv_heads),
    )
    return build_tokens(
        options, LlamaModel(with_attention(config, options)), decoder=True, kv_heads=kv_heads, rope=True
    )


def _decoder_sizes(options: ExportOptions, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": options.head_dim,
        "intermediate_size": options.intermediate or 3 * options.hidden,
        "max_position_embeddings": options.longest,
    }


FAMILIES = (
    Family("bert", _bert),
    Family("gpt2", _gpt2),
    Family("llama", _llama),
)
