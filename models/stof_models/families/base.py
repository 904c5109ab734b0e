"""What every architecture hands to the exporter, and the pieces they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig

from stof_models.errors import ExportError
from stof_models.info import InputInfo, SiteInfo
from stof_models.injection import MaskArgument, MaskTable, registered_mask_function
from stof_models.masks import MaskSpec, make_mask
from stof_models.options import NATIVE, ExportOptions

Config = TypeVar("Config", bound=PreTrainedConfig)
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
NUMPY_DTYPES = {"fp32": "float32", "fp16": "float16"}
BATCH, SEQUENCE, ENCODER_SEQUENCE = "batch", "sequence", "encoder_sequence"
_NO_WEIGHTS: ContextVar[bool] = ContextVar("no weights", default=False)
CAUSAL_KINDS = frozenset({"none", "causal", "causal-br", "causal-window", "prefix-lm"})  # taken as they are


@dataclass(frozen=True)
class Built:
    """A model ready for export. `module` takes the inputs in order; `context` is active while it runs."""

    module: torch.nn.Module
    inputs: tuple[InputInfo, ...]
    outputs: tuple[str, ...]
    sites: tuple[SiteInfo, ...]
    dims: dict[str, int]
    max_dims: dict[str, int]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Family:
    """One architecture: how to build it, and what it does not have."""

    name: str
    build: Callable[[ExportOptions], Built]
    masks: bool = True  # its attention takes a mask argument
    padding: bool = True  # it takes a 2-D attention_mask
    cross: bool = False  # it has cross attention
    dynamic: tuple[str, ...] = ("none", "batch", "sequence")
    attentions: tuple[str, ...] = ("eager", "sdpa")

    def why_not(self, options: ExportOptions) -> str:
        """Why the architecture has no such variant ("" when it has)."""
        if options.mask != NATIVE and not self.masks:
            return f"{self.name} attention takes no mask"
        if options.cross_mask != NATIVE and not self.cross:
            return f"{self.name} has no cross attention"
        if options.padding and not self.padding:
            return f"{self.name} takes no attention_mask"
        if options.dynamic not in self.dynamic:
            return f"the sequence length of {self.name} is part of the model: dynamic can be {', '.join(self.dynamic)}"
        if options.attention not in self.attentions:
            return (
                f"{self.name} has no {options.attention} attention (transformers offers {', '.join(self.attentions)})"
            )
        return ""

    def check(self, options: ExportOptions) -> None:
        reason = self.why_not(options)
        if reason:
            raise ExportError(reason)


def zoo_mask(
    options: ExportOptions, kind: str, seq_q: int, seq_kv: int, *, decoder: bool, band: tuple[str, int] = ("", 0)
) -> MaskSpec:
    """The zoo mask of `kind` for this export; `band` is the window of an architecture's local layers."""
    spec = make_mask(
        kind,
        seq_q,
        seq_kv,
        heads=options.heads,
        causal=decoder and kind not in CAUSAL_KINDS,
        seed=options.seed,
        **options.mask_fields,
    )
    return replace(spec, band=band[0], band_width=band[1])


def mask_argument(options: ExportOptions, spec: MaskSpec) -> MaskArgument:
    return MaskArgument(
        spec, options.mask_style, options.attention, TORCH_DTYPES[options.dtype], options.dynamic == "sequence"
    )


def mask_context(options: ExportOptions, specs: dict[str, MaskSpec]) -> Callable[[], AbstractContextManager[Any]]:
    """The context of mask style "function": see `registered_mask_function` for the keys."""
    tables = {role: MaskTable(spec) for role, spec in specs.items()}
    return lambda: registered_mask_function(options.attention, tables)


def with_attention(config: Config, options: ExportOptions) -> Config:
    """`config` with the attention implementation asked for (the argument `attn_implementation` of from_pretrained)."""
    config._attn_implementation = options.attention
    return config


def self_mask(
    options: ExportOptions, longest: int, *, decoder: bool, band: tuple[str, int] = ("", 0)
) -> MaskSpec | None:
    """The declared self-attention mask (None: every key); `band` is a local layer's (kind, width)."""
    if options.mask != NATIVE:
        return zoo_mask(options, options.mask, longest, longest, decoder=decoder, band=band)
    if not decoder and not band[0]:
        return None
    return replace(make_mask("causal" if decoder else "none", longest), band=band[0], band_width=band[1])


@contextmanager
def without_weights() -> Iterator[None]:
    """While active, built models hold parameters of the right shape and dtype that take no storage.

    Each is one value of its own, since exporters merge equal parameters.
    """
    token = _NO_WEIGHTS.set(True)
    try:
        yield
    finally:
        _NO_WEIGHTS.reset(token)


def finish(model: torch.nn.Module, options: ExportOptions) -> torch.nn.Module:
    """Evaluation mode, the wanted dtype, and weights large enough that attention matters in the outputs."""
    dtype = TORCH_DTYPES[options.dtype]
    if _NO_WEIGHTS.get():
        number = 0
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                number += 1
                value = torch.tensor(number / 2**20).to(dtype).expand(parameter.shape)
                setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
        return model.eval()
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "relative_attention_bias" not in name and "relative_position" not in name:
                fan_in = parameter[0].numel()
                parameter.normal_(0.0, fan_in**-0.5, generator=generator)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    return model.eval().to(dtype)


def tokens(name: str, options: ExportOptions, axis: str, length: int) -> InputInfo:
    return InputInfo(name, "int64", (batch_dim(options), seq_dim(options, axis, length)), "tokens", options.vocab)


def padding(name: str, options: ExportOptions, axis: str, length: int) -> InputInfo:
    return InputInfo(name, "int64", (batch_dim(options), seq_dim(options, axis, length)), "padding")


def batch_dim(options: ExportOptions) -> int | str:
    return options.batch if options.dynamic == "none" else BATCH


def seq_dim(options: ExportOptions, axis: str, length: int) -> int | str:
    return axis if options.dynamic == "sequence" else length
