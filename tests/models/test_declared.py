"""The declared masks are those that the model itself attends with: seen by recording what its attention is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from stof_models.export import example_inputs
from stof_models.families import FAMILIES, family
from stof_models.info import ExportInfo
from stof_models.options import NATIVE, ExportOptions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2

LAYERS = 2


@contextmanager
def _recorded(attention: str, seen: list[dict[str, Any]]) -> Iterator[None]:
    """Attention notes shapes, mask, causal flag and bias of each call. Of the eager ones, Gemma 2's is known here."""
    registered = ALL_ATTENTION_FUNCTIONS._global_mapping
    previous = registered.get(attention)
    original = previous or modeling_gemma2.eager_attention_forward

    def record(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        causal = bool(getattr(module, "is_causal", True)) and attention_mask is None and query.shape[2] > 1
        seen.append({"q": query.shape, "k": key.shape, "mask": attention_mask, "causal": causal, **kwargs})
        return original(module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(attention, record)
    try:
        yield
    finally:
        del registered[attention]
        if previous is not None:
            ALL_ATTENTION_FUNCTIONS.register(attention, previous)


def _run(options: ExportOptions) -> tuple[ExportInfo, list[dict[str, Any]]]:
    built = family(options.family).build(options)
    info = ExportInfo(options.family, {}, built.inputs, built.outputs, built.dims, built.max_dims, built.sites)
    seen: list[dict[str, Any]] = []
    with torch.no_grad(), built.context(), _recorded(options.attention, seen):
        output = built.module(*example_inputs(info))
    assert torch.isfinite(output).all()
    return info, seen


def _attended(call: dict[str, Any]) -> np.ndarray:
    """The mask of one call, bool [B or 1, H or 1, S_q, S_kv]."""
    size = (1, 1, call["q"][2], call["k"][2])
    if call["causal"]:
        return np.tril(np.ones(size, bool))
    mask = call["mask"]
    if mask is None:
        return np.ones(size, bool)
    if mask.dtype == torch.bool:
        return mask.numpy()
    return (mask > torch.finfo(mask.dtype).min / 2).numpy()


def _attention(name: str) -> str:
    return "sdpa" if "sdpa" in FAMILIES[name].attentions else "eager"


CASES = [
    pytest.param(name, mask, style, padding, id=f"{name}-{mask}-{style}-{padding}")
    for name, arch in FAMILIES.items()
    for mask, style, padding in (
        (NATIVE, "bool", False),
        (NATIVE, "bool", True),
        ("longformer", "bool", False),
        ("longformer", "function", True),
        ("prefix-lm", "additive", True),
        ("per-head", "additive", False),
    )
    if (arch.masks or mask == NATIVE) and (arch.padding or not padding)
]


@pytest.mark.parametrize(("name", "mask", "style", "padding"), CASES)
def test_declared_masks(name: str, mask: str, style: str, padding: bool) -> None:
    options = ExportOptions(
        name, mask=mask, mask_style=style, padding=padding, layers=LAYERS, attention=_attention(name)
    )
    if FAMILIES[name].cross and mask == "longformer":
        options = replace(options, cross_mask="random")
    info, seen = _run(options)
    assert len(seen) == len(info.sites)
    for site, call in zip(info.sites, seen, strict=True):
        batch = options.batch * site.batch_factor
        assert tuple(call["q"]) == (batch, site.heads, site.seq_q, site.head_dim), site
        assert tuple(call["k"]) == (batch, site.kv_heads, site.seq_kv, site.head_dim), site
        declared = site.expected_mask(info.dims)
        declared = declared if declared.ndim == 3 else declared[None]
        assert (_attended(call) == declared[None]).all(), site
        has_bias = call.get("position_bias") is not None and bool((call["position_bias"] != 0).any())
        if site.bias == "relative":
            assert has_bias
            diagonals = call["position_bias"][0, 0].numpy()
            assert all(len(np.unique(np.diagonal(diagonals, d))) == 1 for d in range(-3, 4))
        else:
            assert not has_bias


@pytest.mark.parametrize("name", [n for n, arch in FAMILIES.items() if arch.padding])
def test_padding_reaches_attention(name: str) -> None:
    """Hiding the last token changes the mask of every site that declares padding, and of no other."""
    options = ExportOptions(name, padding=True, layers=LAYERS, attention=_attention(name))
    built = family(name).build(options)
    info = ExportInfo(name, {}, built.inputs, built.outputs, built.dims, built.max_dims, built.sites)
    inputs = example_inputs(info)
    for spec, tensor in zip(info.inputs, inputs, strict=True):
        if spec.draw == "padding":
            tensor[:, -1] = 0
    seen: list[dict[str, Any]] = []
    with torch.no_grad(), _recorded(options.attention, seen):
        built.module(*inputs)
    for site, call in zip(info.sites, seen, strict=True):
        attends_last = bool(_attended(call)[..., -1, -1].any())
        assert attends_last != site.padding, site
