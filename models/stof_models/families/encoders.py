"""BERT, ModernBERT and T5's encoder."""

from __future__ import annotations

from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel, T5Config, T5EncoderModel

from stof_models.families.base import Built, Family, finish, with_attention
from stof_models.families.tokens import build_tokens
from stof_models.masks import make_mask
from stof_models.options import ExportOptions


def _bert(options: ExportOptions) -> Built:
    config = BertConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=options.intermediate or 4 * options.hidden,
        max_position_embeddings=options.longest,
    )
    model = BertModel(with_attention(config, options), add_pooling_layer=False)
    return build_tokens(options, finish(model, options), decoder=False)


def _modernbert(options: ExportOptions) -> Built:
    width = make_mask("window", options.longest).width
    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(options.layers)]
    config = ModernBertConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=options.intermediate or 2 * options.hidden,
        max_position_embeddings=options.longest,
        layer_types=kinds,
        local_attention=2 * width,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        cls_token_id=0,
        sep_token_id=0,
    )
    model = ModernBertModel(with_attention(config, options))
    bands = [("window", width) if kind == "sliding_attention" else ("", 0) for kind in kinds]
    return build_tokens(options, finish(model, options), decoder=False, layer_bands=bands, rope=True)


def _t5_encoder(options: ExportOptions) -> Built:
    model = T5EncoderModel(with_attention(t5_config(options), options))
    return build_tokens(options, finish(model, options), decoder=False, bias="relative")


def t5_config(options: ExportOptions) -> T5Config:
    return T5Config(
        vocab_size=options.vocab,
        d_model=options.hidden,
        d_kv=options.head_dim,
        d_ff=options.intermediate or 4 * options.hidden,
        num_layers=options.layers,
        num_decoder_layers=options.layers,
        num_heads=options.heads,
        use_cache=False,
    )


FAMILIES = (Family("bert", _bert), Family("modernbert", _modernbert), Family("t5-encoder", _t5_encoder))
