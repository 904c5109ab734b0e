"""What an exported model contains: its attention sites, and how to draw valid inputs for it. numpy only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stof_models.masks import MaskSpec

Dim = int | str  # a fixed size, or the name of a dynamic axis


@dataclass(frozen=True)
class SiteInfo:
    """One attention of the model, in execution order.

    `mask` is the static mask at the largest size (None: every key is allowed); at a smaller size its leading
    submatrix applies. `bias` is what else is added to the scores.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    seq_q: Dim
    seq_kv: Dim
    mask: MaskSpec | None = None
    padding: bool = False  # a run-time key padding mask is present
    bias: str = "none"  # none | dense | relative
    softcap: float = 0.0
    batch_factor: int = 1  # attention cores run at this multiple of the model's batch (Swin: windows an image)

    def expected_mask(self, dims: dict[str, int]) -> np.ndarray:
        """The static mask at the sizes `dims`: bool [S_q, S_kv], or [heads, S_q, S_kv] where heads differ."""
        seq_q, seq_kv = resolve(self.seq_q, dims), resolve(self.seq_kv, dims)
        if self.mask is None:
            return np.ones((seq_q, seq_kv), bool)
        return self.mask.dense(seq_q, seq_kv)


@dataclass(frozen=True)
class InputInfo:
    """One graph input and how to draw it: tokens (below `high`), padding (0/1 rows of ones), or normal."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    draw: str = "normal"  # tokens | padding | normal
    high: int = 0


@dataclass(frozen=True)
class ExportInfo:
    """Everything a test needs to know about an exported file; `save`d as `<model>.json` beside it."""

    family: str
    options: dict[str, Any]
    inputs: tuple[InputInfo, ...]
    outputs: tuple[str, ...]
    dims: dict[str, int]  # sizes of the dynamic axes at which the model was traced
    max_dims: dict[str, int]  # largest sizes it accepts
    sites: tuple[SiteInfo, ...]

    def save(self, path: Path) -> None:
        fields = asdict(self)
        for site, fields_of_site in zip(self.sites, fields["sites"], strict=True):
            fields_of_site["mask"] = None if site.mask is None else site.mask.to_dict()
        path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> ExportInfo:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["inputs"] = tuple(InputInfo(**{**i, "shape": tuple(i["shape"])}) for i in fields["inputs"])
        fields["outputs"] = tuple(fields["outputs"])
        fields["sites"] = tuple(_load_site(site) for site in fields["sites"])
        return ExportInfo(**fields)

    def random_inputs(
        self, rng: np.random.Generator, dims: dict[str, int] | None = None, *, padded: bool = True
    ) -> dict[str, np.ndarray]:
        """Valid random inputs at the sizes `dims` (default: as traced).

        With `padded`, the first batch entry is full and each other one keeps a random non-empty run of its tokens,
        so both left and right padding occur (with a batch of 1 that one is cut); without, all ones.
        """
        sizes = {**self.dims, **(dims or {})}
        return {i.name: _draw(i, tuple(resolve(d, sizes) for d in i.shape), rng, padded) for i in self.inputs}


def info_path(model: Path) -> Path:
    """Where the ExportInfo of `model` lies."""
    return model.with_suffix(".json")


def resolve(dim: Dim, dims: dict[str, int]) -> int:
    return dim if isinstance(dim, int) else dims[dim]


def _load_site(fields: dict[str, Any]) -> SiteInfo:
    mask = fields["mask"]
    return SiteInfo(
        **{
            **fields,
            "mask": None if mask is None else MaskSpec.from_dict(mask),
        }
    )


def _draw(spec: InputInfo, shape: tuple[int, ...], rng: np.random.Generator, padded: bool) -> np.ndarray:
    if spec.draw == "tokens":
        return rng.integers(0, spec.high, shape).astype(spec.dtype)
    if spec.draw == "padding":
        mask = np.ones(shape, spec.dtype)
        if padded:
            batch, seq = shape
            for row in range(0 if batch == 1 else 1, batch):
                first, last = sorted(rng.integers(0, seq, 2))
                mask[row, :first] = 0
                mask[row, last + 1 :] = 0
        return mask
    return rng.standard_normal(shape).astype(spec.dtype)
