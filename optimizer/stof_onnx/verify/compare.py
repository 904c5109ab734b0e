"""Runs both models on the same inputs and judges every output and every attention site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import onnx

from stof_onnx.attention.types import AttentionMatch, Layout
from stof_onnx.errors import StofError
from stof_onnx.graph.read import read_proto
from stof_onnx.options import OptimizeOptions
from stof_onnx.verify import judge
from stof_onnx.verify.reference import Reference
from stof_onnx.verify.result import OutputError, ScoreBound, Verification
from stof_onnx.verify.samples import Sample
from stof_onnx.verify.session import Runner

_NO_WAY_OUT = "Pass inputs with --load-inputs, sizes with --shape, or --no-verify to write it unverified"


@dataclass(frozen=True)
class Side:
    """One of the two models: its protobuf and the folder its external data lies in."""

    proto: onnx.ModelProto
    base_dir: Path

    @staticmethod
    def read(path: Path) -> Side:
        """The model in a file."""
        return Side(read_proto(path), path.parent)

    @property
    def tensors(self) -> set[str]:
        """Names that nodes of the main graph compute."""
        return {o for n in self.proto.graph.node for o in n.output if o}


@dataclass(frozen=True)
class SiteProbe:
    """Where to look at one attention: its tensors by name, and what AttentionMatch says of their form."""

    name: str
    output: str
    q: str
    k: str
    v: str
    q_layout: Layout
    k_layout: Layout
    v_layout: Layout
    o_layout: Layout
    ranks: tuple[int, int, int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    seq_q: int
    seq_kv: int
    dtype: np.dtype
    scale: float
    score_bound: float

    @staticmethod
    def of(match: AttentionMatch) -> SiteProbe:
        """The probe of a match (made before the rewrite renames anything)."""
        values = {f.name: getattr(match, f.name) for f in fields(SiteProbe)}
        tensors = {name: values[name].name for name in ("q", "k", "v", "output")}
        shapes = [t.shape for t in (match.q, match.k, match.v)]
        ranks = tuple(r if s is None else len(s) for r, s in zip(match.ranks, shapes, strict=True))
        return SiteProbe(**{**values, **tensors, "ranks": ranks})

    def largest_score(self, tensors: dict[str, np.ndarray]) -> float | None:
        """An upper bound of |scale * q . k| over these tensors (Cauchy-Schwarz); None where they are not at hand."""
        if self.q not in tensors or self.k not in tensors:
            return None
        return abs(self.scale) * self._largest_norm(tensors[self.q]) * self._largest_norm(tensors[self.k])

    def _largest_norm(self, values: np.ndarray) -> float:
        rows = values.astype(np.float64).reshape(-1, self.head_dim)
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
        return float(np.nanmax(norms, initial=0.0))


def compare_models(
    original: Side,
    optimized: Side,
    sites: Sequence[SiteProbe],
    samples: Sequence[Sample],
    seed: int | None,
    options: OptimizeOptions,
) -> Verification:
    """Compares graph outputs, and each site's output where both models have a tensor of its name.

    Raises:
        StofError: a model does not run at all (a sample that the original refuses is skipped, and noted).
    """
    same_interface(original.proto, optimized.proto)
    common = original.tensors & optimized.tensors
    probes = {s.name: s.output for s in sites if s.output in common}
    factors = {t for s in sites if np.isfinite(s.score_bound) for t in (s.q, s.k)} & original.tensors
    try:
        first = Runner(original.proto, original.base_dir, [*probes.values(), *factors])
    except StofError as refused:
        what = f"the original itself does not load: {refused.what}"
        raise StofError(what, "verify", "Pass --no-verify to write the result unverified") from refused
    reference = Reference(original.proto, original.base_dir, probes.values())
    result = Verification("whole model", judge.rule(options.atol, options.rtol), seed)
    try:
        second = Runner(optimized.proto, optimized.base_dir, probes.values())
    except StofError as refused:
        result.broken = refused.what
        return result
    names = [o.name for o in original.proto.graph.output]
    tensors: dict[str, OutputError] = {}
    seen: dict[str, float] = {}
    for sample in samples:
        try:
            want = first.run(sample.feeds)
        except StofError as refused:
            result.notes.append(f"the original does not run with {sample.what}: {refused.what}")
            continue
        result.samples.append(sample.what)
        try:
            got = second.run(sample.feeds)
        except StofError as failed:
            result.broken = f"{failed.what}, with {sample.what}"
            return result
        high = reference.of(sample.feeds)
        for name in dict.fromkeys([*names, *probes.values()]):
            error = tensors.setdefault(name, OutputError(name, str(want[name].dtype)))
            judge.compare(error, want[name], got[name], _tensor_of(high, name), options.atol, options.rtol)
        for site in sites:
            if np.isfinite(site.score_bound):
                bound = site.largest_score(want | sample.feeds)
                if bound is not None:
                    seen[site.name] = max(seen.get(site.name, 0.0), bound)
    if not result.samples:
        raise StofError(f"can not be verified: {'; '.join(result.notes) or 'no samples'}", "verify", _NO_WAY_OUT)
    result.outputs = [tensors[n] for n in names]
    result.sites = {site: tensors[tensor] for site, tensor in probes.items()}
    result.score_bounds = [ScoreBound(s.name, s.score_bound, seen[s.name]) for s in sites if s.name in seen]
    if reference.note:
        result.notes.append(reference.note)
    return result


def _tensor_of(high: Callable[[], dict[str, np.ndarray] | None], name: str) -> Callable[[], np.ndarray | None]:
    def tensor() -> np.ndarray | None:
        outputs = high()
        return None if outputs is None else outputs.get(name)

    return tensor


def same_interface(original: onnx.ModelProto, optimized: onnx.ModelProto) -> None:
    """Refuses models with different inputs or outputs.

    Raises:
        StofError: see above.
    """
    for kind in ("input", "output"):
        a = [v.name for v in getattr(original.graph, kind)]
        b = [v.name for v in getattr(optimized.graph, kind)]
        weights = {t.name for t in (*original.graph.initializer, *optimized.graph.initializer)}
        if [n for n in a if n not in weights] != [n for n in b if n not in weights]:
            raise StofError(f"the models have different {kind}s: {a} and {b}", "verify", "Compare a model with its own")
