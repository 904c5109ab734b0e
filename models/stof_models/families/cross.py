"""Models with cross attention: BART's decoder, T5's decoder, and Whisper (encoder and decoder)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BartConfig, WhisperConfig, WhisperModel
from transformers.models.bart.modeling_bart import BartDecoder
from transformers.models.t5.modeling_t5 import T5Stack

from stof_models.families.base import (
    BATCH,
    ENCODER_SEQUENCE,
    NUMPY_DTYPES,
    SEQUENCE,
    Built,
    Family,
    batch_dim,
    finish,
    mask_argument,
    mask_context,
    padding,
    self_mask,
    seq_dim,
    tokens,
    with_attention,
    zoo_mask,
)
from stof_models.families.encoders import t5_config
from stof_models.info import InputInfo, SiteInfo
from stof_models.masks import MaskSpec
from stof_models.options import NATIVE, ExportOptions

WHISPER_MELS = 8
MaskModule = torch.nn.Module


class DecoderModel(torch.nn.Module):
    """input_ids [B, S] and encoder_hidden_states [B, E, hidden] (and both padding masks) to hidden states."""

    def __init__(self, model: torch.nn.Module, own: MaskModule | None, cross: MaskModule | None) -> None:
        super().__init__()
        self.model, self.own, self.cross = model, own, cross

    def forward(
        self,
        input_ids: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        seq, encoder_seq = input_ids.shape[1], encoder_hidden_states.shape[1]
        own = attention_mask if self.own is None else self.own(seq, seq, attention_mask)
        cross = encoder_attention_mask if self.cross is None else self.cross(seq, encoder_seq, encoder_attention_mask)
        return self.model(
            input_ids=input_ids,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=own,
            encoder_attention_mask=cross,
            use_cache=False,
        ).last_hidden_state


class SpeechModel(torch.nn.Module):
    """input_features [B, mel, 2 E] and decoder_input_ids [B, S] (and decoder_attention_mask) to hidden states."""

    def __init__(self, model: torch.nn.Module, own: MaskModule | None, *, ones: bool) -> None:
        super().__init__()
        self.model, self.own, self.ones = model, own, ones

    def forward(
        self,
        input_features: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mask: Any = decoder_attention_mask
        if mask is None and self.ones:  # see TokenModel
            mask = torch.ones_like(decoder_input_ids)
        if self.own is not None:
            seq = decoder_input_ids.shape[1]
            mask = self.own(seq, seq, decoder_attention_mask)
        return self.model(
            input_features=input_features,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=mask,
            use_cache=False,
        ).last_hidden_state


def _bart_decoder(options: ExportOptions) -> Built:
    config = BartConfig(
        vocab_size=options.vocab,
        d_model=options.hidden,
        decoder_layers=options.layers,
        decoder_attention_heads=options.heads,
        decoder_ffn_dim=options.intermediate or 4 * options.hidden,
        max_position_embeddings=options.longest,
        is_decoder=True,
        is_encoder_decoder=False,
        use_cache=False,
        **_special_tokens(),
    )
    return _build_decoder(options, BartDecoder(with_attention(config, options)), bias="none")


def _t5_decoder(options: ExportOptions) -> Built:
    config = t5_config(options)
    config.is_decoder = True
    config.is_encoder_decoder = False
    model = T5Stack(with_attention(config, options))
    return _build_decoder(options, model, bias="relative")


def _build_decoder(options: ExportOptions, model: torch.nn.Module, *, bias: str) -> Built:
    longest, encoder_longest = options.longest, options.encoder_longest
    own = self_mask(options, longest, decoder=True)
    cross = None
    if options.cross_mask != NATIVE:
        cross = zoo_mask(options, options.cross_mask, longest, encoder_longest, decoder=False)
    encoder_seq = options.encoder_seq
    inputs = [
        tokens("input_ids", options, SEQUENCE, options.seq),
        InputInfo(
            "encoder_hidden_states",
            NUMPY_DTYPES[options.dtype],
            (batch_dim(options), seq_dim(options, ENCODER_SEQUENCE, encoder_seq), options.hidden),
        ),
    ]
    if options.padding:
        inputs.append(padding("attention_mask", options, SEQUENCE, options.seq))
        inputs.append(padding("encoder_attention_mask", options, ENCODER_SEQUENCE, encoder_seq))
    own_module, context = _inject(options, own, cross)
    return Built(
        DecoderModel(
            finish(model, options),
            own_module,
            mask_argument(options, cross) if cross is not None and options.mask_style != "function" else None,
        ).eval(),
        tuple(inputs),
        ("last_hidden_state",),
        tuple(
            site
            for i in range(options.layers)
            for site in _layer(
                options,
                i,
                own,
                cross,
                seq_dim(options, ENCODER_SEQUENCE, encoder_seq),
                bias=bias,
                cross_padding=options.padding,
            )
        ),
        {BATCH: options.batch, SEQUENCE: options.seq, ENCODER_SEQUENCE: encoder_seq},
        {SEQUENCE: longest, ENCODER_SEQUENCE: encoder_longest},
        **context,
    )


def _whisper(options: ExportOptions) -> Built:
    encoder_seq = options.encoder_seq
    config = WhisperConfig(
        vocab_size=options.vocab,
        num_mel_bins=WHISPER_MELS,
        d_model=options.hidden,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
        encoder_attention_heads=options.heads,
        decoder_attention_heads=options.heads,
        encoder_ffn_dim=options.intermediate or 4 * options.hidden,
        decoder_ffn_dim=options.intermediate or 4 * options.hidden,
        max_source_positions=encoder_seq,
        max_target_positions=options.longest,
        use_cache=False,
        **_special_tokens(),
    )
    own = self_mask(options, options.longest, decoder=True)
    own_module, context = _inject(options, own, None)
    batch = batch_dim(options)
    inputs = [
        InputInfo("input_features", NUMPY_DTYPES[options.dtype], (batch, WHISPER_MELS, 2 * encoder_seq)),
        tokens("decoder_input_ids", options, SEQUENCE, options.seq),
    ]
    if options.padding:
        inputs.append(padding("decoder_attention_mask", options, SEQUENCE, options.seq))
    encoder_sites = tuple(
        SiteInfo(f"encoder.{i}.self", options.heads, options.heads, options.head_dim, encoder_seq, encoder_seq)
        for i in range(options.layers)
    )
    decoder_sites = tuple(
        site for i in range(options.layers) for site in _layer(options, i, own, None, encoder_seq, bias="none")
    )
    model = finish(WhisperModel(with_attention(config, options)), options)
    return Built(
        SpeechModel(model, own_module, ones=options.exporter == "torchscript").eval(),
        tuple(inputs),
        ("last_hidden_state",),
        encoder_sites + decoder_sites,
        {BATCH: options.batch, SEQUENCE: options.seq},
        {SEQUENCE: options.longest},
        **context,
    )


def _inject(
    options: ExportOptions, own: MaskSpec | None, cross: MaskSpec | None
) -> tuple[MaskModule | None, dict[str, Any]]:
    if options.mask_style == "function":
        specs = {}
        if options.mask != NATIVE and own is not None:
            specs["decoder"] = own
        if cross is not None:
            specs["cross"] = cross
        return None, {"context": mask_context(options, specs)} if specs else {}
    return (mask_argument(options, own) if options.mask != NATIVE and own is not None else None), {}


def _layer(
    options: ExportOptions,
    index: int,
    own: MaskSpec | None,
    cross: MaskSpec | None,
    encoder_seq: int | str,
    *,
    bias: str,
    cross_padding: bool = False,
) -> tuple[SiteInfo, SiteInfo]:
    heads, dim = options.heads, options.head_dim
    seq = seq_dim(options, SEQUENCE, options.seq)
    return (
        SiteInfo(f"decoder.{index}.self", heads, heads, dim, seq, seq, own, options.padding, bias),
        SiteInfo(f"decoder.{index}.cross", heads, heads, dim, seq, encoder_seq, cross, cross_padding),
    )


def _special_tokens() -> dict[str, Any]:
    return {
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "decoder_start_token_id": 0,
        "forced_eos_token_id": None,
    }


FAMILIES = (
    Family("bart-decoder", _bart_decoder, cross=True),
    Family("t5-decoder", _t5_decoder, cross=True),
    Family("whisper", _whisper),
)
