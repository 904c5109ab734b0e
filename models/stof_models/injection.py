"""Puts a zoo mask into a transformers model as users do: a 4-D mask argument, or a registered mask function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    eager_mask,
    sdpa_mask,
)

from stof_models.masks import MaskSpec


class MaskArgument(torch.nn.Module):
    """Builds the 4-D mask argument of a model from a constant and, when given, the 2-D padding mask.

    style "bool": Boolean And, handed over as it is to sdpa and as Where(mask, 0, lowest) to eager attention;
    style "additive": a float constant (0 or lowest), to which padding adds (1 - attention_mask) * lowest.
    """

    table: torch.Tensor

    def __init__(self, spec: MaskSpec, style: str, attention: str, dtype: torch.dtype, dynamic: bool) -> None:
        super().__init__()
        self.additive, self.eager, self.dynamic = style == "additive", attention == "eager", dynamic
        self.lowest = torch.finfo(dtype).min
        self.dtype = dtype
        allowed = torch.from_numpy(spec.dense())
        allowed = allowed[None] if allowed.ndim == 3 else allowed[None, None]
        table = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, self.lowest) if self.additive else allowed
        self.register_buffer("table", table)

    def forward(self, seq_q: int, seq_kv: int, padding: torch.Tensor | None) -> torch.Tensor:
        mask = self.table[:, :, :seq_q, :seq_kv] if self.dynamic else self.table
        if self.additive:
            if padding is not None:
                mask = mask + (1.0 - padding[:, None, None, :].to(self.dtype)) * self.lowest
            return mask
        if padding is not None:
            mask = mask & padding[:, None, None, :].to(torch.bool)
        if self.eager:
            mask = torch.where(mask, torch.zeros((), dtype=self.dtype), self.lowest)
        return mask


class MaskTable(torch.nn.Module):
    """A mask as an index function for transformers' mask interface: allowed = table[q, k]."""

    table: torch.Tensor

    def __init__(self, spec: MaskSpec) -> None:
        super().__init__()
        self.register_buffer("table", torch.from_numpy(spec.dense()))

    def __call__(self, batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.table[q, k]


@contextmanager
def registered_mask_function(attention: str, tables: dict[str, MaskTable]) -> Iterator[None]:
    """While active, transformers builds its masks from these tables.

    Keys: "full" for self attention and "local" for its sliding-window layers (default "full"); in models with cross
    attention "decoder" and "cross". A role without a table keeps its own mask.
    """
    build: Any = {"eager": eager_mask, "sdpa": sdpa_mask}[attention]

    def from_table(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        if kwargs.get("local_size") is not None:
            table = tables.get("local", tables.get("full"))
        elif "cross" in tables or "decoder" in tables:
            table = tables.get("cross" if kwargs["mask_function"] is bidirectional_mask_function else "decoder")
        else:
            table = tables.get("full")
        if table is not None:
            kwargs["mask_function"] = table
            kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
        return build(*args, **kwargs)

    previous: Any = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[attention]
    ALL_MASK_ATTENTION_FUNCTIONS.register(attention, from_table)
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS.register(attention, previous)
