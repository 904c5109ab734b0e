"""GPT-2, LLaMA, Mistral (sliding window), Gemma 2 (local/global, softcap) and Gemma 3 (local/global)."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma2Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
)

from stof_models.families.base import Built, Family, finish, with_attention
from stof_models.families.tokens import build_tokens
from stof_models.masks import make_mask
from stof_models.options import ExportOptions

SOFTCAP = 50.0  # Gemma 2's own


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
        use_cache=False,
    )
    return build_tokens(options, finish(GPT2Model(with_attention(config, options)), options), decoder=True)


def _llama(options: ExportOptions) -> Built:
    config = LlamaConfig(**_sizes(options))
    return _build(options, LlamaModel(with_attention(config, options)))


def _mistral(options: ExportOptions) -> Built:
    config = MistralConfig(**_sizes(options), sliding_window=_window(options) + 1)
    local = [("causal-window", _window(options))] * options.layers
    return _build(options, MistralModel(with_attention(config, options)), layer_bands=local)


def _gemma2(options: ExportOptions) -> Built:
    config = Gemma2Config(
        **_sizes(options),
        **_alternating(options),
        attn_logit_softcapping=SOFTCAP,
        query_pre_attn_scalar=options.head_dim,
    )
    model = Gemma2Model(with_attention(config, options))
    return _build(options, model, layer_bands=_bands(options), softcap=SOFTCAP)


def _gemma3(options: ExportOptions) -> Built:
    config = Gemma3TextConfig(**_sizes(options), **_alternating(options), query_pre_attn_scalar=options.head_dim)
    return _build(options, Gemma3TextModel(with_attention(config, options)), layer_bands=_bands(options))


def _build(options: ExportOptions, model: Any, **layout: Any) -> Built:
    return build_tokens(options, finish(model, options), decoder=True, kv_heads=_kv_heads(options), rope=True, **layout)


def _kv_heads(options: ExportOptions) -> int:
    return options.kv_heads or max(1, options.heads // 2)


def _window(options: ExportOptions) -> int:
    """How many earlier tokens a local layer sees; transformers' `sliding_window` also counts the token itself."""
    return make_mask("causal-window", options.longest).width


def _alternating(options: ExportOptions) -> dict[str, Any]:
    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(options.layers)]
    return {"layer_types": kinds, "sliding_window": _window(options) + 1}


def _bands(options: ExportOptions) -> list[tuple[str, int]]:
    return [("causal-window", _window(options)) if i % 2 == 0 else ("", 0) for i in range(options.layers)]


def _sizes(options: ExportOptions) -> dict[str, Any]:
    return {
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": _kv_heads(options),
        "head_dim": options.head_dim,
        "intermediate_size": options.intermediate or 3 * options.hidden,
        "max_position_embeddings": options.longest,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


FAMILIES = (
    Family("gpt2", _gpt2),
    Family("llama", _llama),
    Family("mistral", _mistral),
    Family("gemma2", _gemma2, attentions=("eager",)),
    Family("gemma3", _gemma3),
)
