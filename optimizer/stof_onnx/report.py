"""The report: what was found, what was replaced, what stopped the rest, and what the comparison measured."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from stof_onnx import __version__
from stof_onnx.attention.functions.attention import PREFIX
from stof_onnx.attention.types import AttentionMatch, BiasKind, KvKind, MaskedRow, Refusal
from stof_onnx.files import write_text
from stof_onnx.graph.model import LoadedModel
from stof_onnx.mask.encoded import EncodedMask
from stof_onnx.mask.statistics import MaskStats, statistics
from stof_onnx.pictures import MaskPicture
from stof_onnx.trt.choose import EngineResult
from stof_onnx.trt.engine_step import EngineCheck
from stof_onnx.trt.fusion_step import Fusion
from stof_onnx.trt.lower import Lowered
from stof_onnx.verify.result import Verification

_MASK_LIMIT = -1e4  # the largest constant that counts as a mask
_LOOKS_HIDDEN, _SHARE = -10.0, 0.05  # a bias of at most this value in at least this share of its places looks like one
_LIBRARIES = ("onnx", "onnx-graphsurgeon", "onnxruntime", "polygraphy", "numpy", "tensorrt")


@dataclass
class Site:
    """One attention that was (or, in `inspect`, would be) replaced. Tile counts are means over heads and batch."""

    name: str
    mask: str
    bias: str
    density: float
    tiles: dict[str, float] | None
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    seq_q: int
    seq_kv: int
    dynamic_seq: bool
    dtype: str
    masked_row: str
    distinct_masks: int
    score_bound: float | None
    notes: list[str]
    max_abs_err: float | None = None

    @staticmethod
    def of(match: AttentionMatch) -> Site:
        """The report's view of a match."""
        stats = None if match.mask is None else _statistics(match.mask)
        kinds = ["static"] if stats else []
        if match.kv_mask.kind is not KvKind.NONE:
            kinds.append("runtime-padding")
        empty_rows = bool(stats and stats.rows_without_keys) or match.kv_mask.kind is not KvKind.NONE
        return Site(
            name=match.name,
            mask="+".join(kinds) or "none",
            bias=BiasKind(match.bias.kind).value,
            density=stats.density if stats else 1.0,
            tiles={"full": stats.full, "part": stats.part, "empty": stats.empty} if stats else None,
            heads=match.num_heads,
            kv_heads=match.num_kv_heads,
            head_dim=match.head_dim,
            v_head_dim=match.v_head_dim,
            seq_q=match.seq_q,
            seq_kv=match.seq_kv,
            dynamic_seq=match.dynamic_seq,
            dtype=str(match.dtype),
            masked_row=MaskedRow(match.masked_row).value if empty_rows else "none",
            distinct_masks=match.mask.n_masks if match.mask else 0,
            score_bound=None if math.isinf(match.score_bound) else match.score_bound,
            notes=[*match.notes, *_mask_like_bias(match)],
        )


def _mask_like_bias(match: AttentionMatch) -> Iterator[str]:
    """One line where a constant bias looks like a mask (a low value in many places) but is not low enough for one."""
    values = match.bias.array
    if values is None:
        return
    low = float(np.min(values, initial=0.0, where=np.isfinite(values)))
    if _LOOKS_HIDDEN >= low > _MASK_LIMIT and np.count_nonzero(values == low) >= _SHARE * values.size:
        yield (
            f"the value {low:g} added to scores is a bias, not a mask "
            f"(values above {_MASK_LIMIT:g} are added exactly): no key is skipped for it"
        )


@cache
def _statistics(mask: EncodedMask) -> MaskStats:
    return statistics(mask)


@dataclass
class Report:
    """Filled by the steps of the pipeline, in their order. In `inspect`, `replaced` counts what would be replaced."""

    command: str
    source: Path
    output: Path | None = None
    opset: int = 0
    source_opset: int = 0
    sites: list[Site] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    replaced: int = 0
    replaced_before: int = 0  # by an earlier run
    verification: Verification | None = None
    pictures: list[MaskPicture] = field(default_factory=list)
    fusion: Fusion | None = None
    timings: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lowered: Lowered | None = None
    engine: EngineResult | None = None
    no_engine: str = ""  # why there is none, where one was not refused
    engine_check: EngineCheck | None = None

    @property
    def found(self) -> int:
        """Attention sites in the model."""
        return len(self.sites) + len(self.refused)

    @property
    def changed(self) -> bool:
        """False when the optimized model is the original, byte for byte of every tensor and node."""
        return bool(self.replaced) or bool(self.fusion and self.fusion.applied) or self.opset != self.source_opset

    @property
    def failed(self) -> bool:
        """True when the comparison was made and failed."""
        engine_wrong = self.engine_check is not None and not self.engine_check.passed
        return engine_wrong or (self.verification is not None and not self.verification.passed)

    def add_matches(self, model: LoadedModel, matches: Sequence[AttentionMatch], refusals: Sequence[Refusal]) -> None:
        """Notes what the matcher found."""
        self.opset, self.source_opset = model.opset, model.source_opset
        self.replaced_before = sum(n.op_type.partition("_")[0] == PREFIX for n in model.proto.graph.node)
        self.sites = [Site.of(m) for m in matches]
        self.refused = list(refusals)

    def add_verification(self, verification: Verification) -> None:
        """Notes the comparison, and each site's own error."""
        self.verification = verification
        for site in self.sites:
            site.max_abs_err = verification.site_errors.get(site.name)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values (NaN and infinity as strings, so that it is strict JSON)."""
        value = {
            "command": self.command,
            "input": str(self.source),
            "output": None if self.output is None else str(self.output),
            "opset": self.opset,
            "source_opset": self.source_opset,
            "attention": {
                "found": self.found,
                "replaced": self.replaced,
                "refused": [{"node": r.site, "reason": r.reason, "nodes": list(r.nodes)} for r in self.refused],
                "sites": [vars(s) for s in self.sites],
            },
            "fusion": None if self.fusion is None else self.fusion.to_json(),
            "verify": None if self.verification is None else self.verification.to_json(),
            "lowered": None if self.lowered is None else self.lowered.to_json(),
            "engine": None if self.engine is None else self.engine.to_json(),
            "no_engine": self.no_engine,
            "engine_check": None if self.engine_check is None else self.engine_check.to_json(),
            "notes": self.notes,
            "timings": {name: round(seconds, 4) for name, seconds in self.timings.items()},
            "versions": versions(),
        }
        strict: dict[str, Any] = _strict(value)
        return strict

    def write(self, path: Path) -> None:
        """Writes the report as JSON.

        Raises:
            StofError: the file can not be written.
        """
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def versions() -> dict[str, str]:
    """Versions of everything that the result depends on."""
    found = {"stof-onnx": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return value
