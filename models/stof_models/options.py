"""What can be asked of an export, as plain data, and the checks that need no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stof_models.errors import ExportError
from stof_models.masks import KINDS

NATIVE = "native"  # the architecture's own mask
EXPORTERS = ("torchscript", "dynamo")
ATTENTIONS = ("eager", "sdpa")
DYNAMIC = ("none", "batch", "sequence")
DTYPES = ("fp32", "fp16")
MASK_STYLES = ("bool", "additive", "function")
# The parameters of masks: the smallest value, and the masks that read it.
_WINDOWS = ("window", "causal-window", "dilated", "longformer", "per-head")
_MASK_FIELDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "width": (0, _WINDOWS),
    "dilation": (1, ("dilated", "per-head")),
    "global_tokens": (0, ("longformer", "per-head")),
    "block": (1, ("bigbird",)),
    "random_blocks": (0, ("bigbird",)),
    "prefix": (0, ("prefix-lm",)),
    "density": (0, ("random", "per-head")),
}


@dataclass(frozen=True)
class ExportOptions:
    """One export. Sizes of 0 mean the family's default.

    mask        "native" (the architecture's own), or a mask of the zoo put in its place; in decoders the zoo's
                two-sided masks are intersected with causal ("none" and "prefix-lm" are taken as they are)
    cross_mask  the same for cross attention
    mask_style  how a zoo mask enters: "bool" (constant 4-D boolean mask given to the model; eager models get
                Where(mask, 0, lowest)), "additive" (constant 4-D float mask; padding is added as a second term), or
                "function" (a mask function registered with transformers, indexing a table; padding by its own code)
    padding     the graph has 2-D run-time `attention_mask` inputs
    dynamic     "none", "batch", or "sequence" (batch and sequence axes)
    """

    family: str
    mask: str = NATIVE
    mask_fields: dict[str, Any] = field(default_factory=dict)
    cross_mask: str = NATIVE
    mask_style: str = "bool"
    exporter: str = "torchscript"
    opset: int = 17
    attention: str = "sdpa"
    padding: bool = False
    dynamic: str = "none"
    dtype: str = "fp32"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 0
    intermediate: int = 0
    vocab: int = 128
    seq: int = 64
    seq_kv: int = 0  # encoder length of decoders with cross attention
    max_seq: int = 0  # largest sequence of a dynamic axis; default 2 * seq
    batch: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("mask", self.mask, (NATIVE, *KINDS))
        _one_of("cross mask", self.cross_mask, (NATIVE, *KINDS))
        _one_of("mask style", self.mask_style, MASK_STYLES)
        _one_of("exporter", self.exporter, EXPORTERS)
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("dynamic", self.dynamic, DYNAMIC)
        _one_of("dtype", self.dtype, DTYPES)
        for name in ("layers", "hidden", "heads", "vocab", "seq", "batch"):
            if getattr(self, name) < 1:
                raise ExportError(f"--{name} must be at least 1, got {getattr(self, name)}")
        for name in ("kv_heads", "intermediate", "seq_kv", "max_seq", "seed"):
            if getattr(self, name) < 0:
                raise ExportError(f"{_flag(name)} must be at least 0, got {getattr(self, name)}")
        for name, value in self.mask_fields.items():
            self._check_mask_field(name, value)
        if self.hidden % self.heads:
            raise ExportError(f"hidden size {self.hidden} is not a multiple of {self.heads} heads")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ExportError(f"{self.heads} heads are not a multiple of {self.kv_heads} key/value heads")
        if self.max_seq and self.max_seq < self.seq:
            raise ExportError(f"--max-seq {self.max_seq} is below --seq {self.seq}")
        if self.mask == "per-head" and self.mask_style == "function":
            raise ExportError("a mask function of transformers sees no heads: per-head masks need bool or additive")

    def _check_mask_field(self, name: str, value: float) -> None:
        least, masks = _MASK_FIELDS[name]
        if self.mask not in masks and self.cross_mask not in masks:
            raise ExportError(f"{_flag(name)} is for --mask {', '.join(masks)}; this one is {self.mask}")
        if name == "density" and not 0 <= value <= 1:
            raise ExportError(f"--density is the share of allowed elements, 0 to 1, got {value}")
        if value < least:
            raise ExportError(f"{_flag(name)} must be at least {least}, got {value}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def longest(self) -> int:
        """The largest sequence the model must accept."""
        return self.seq if self.dynamic != "sequence" else self.max_seq or 2 * self.seq

    @property
    def encoder_seq(self) -> int:
        """The encoder sequence of a model with cross attention."""
        return self.seq_kv or self.seq + self.seq // 2

    @property
    def encoder_longest(self) -> int:
        """The largest encoder sequence: it grows with the decoder's."""
        return -(-self.encoder_seq * self.longest // self.seq)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ExportError(f"unknown {what} {value!r}; known: {', '.join(known)}")
