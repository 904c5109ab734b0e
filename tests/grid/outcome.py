"""One case of the grid: export, optimize, and compare with what the exporter declares.

Comparisons: each site of the optimized file with its declared mask, bias, heads and padding, and the outputs of both
files on ONNX Runtime with valid inputs of the model (tokens, run-time padding of both sides), which the product's own
verification does not know.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import numpy_helper
from stof_models.errors import ExportError
from stof_models.grid import GridCase, export_case
from stof_models.info import ExportInfo, SiteInfo
from stof_models.masks import MaskSpec
from stof_onnx import pipeline
from stof_onnx.mask.decode import decode
from stof_onnx.mask.encoded import ONNX_INPUTS, EncodedMask
from stof_onnx.options import OptimizeOptions, parse_shapes
from stof_onnx.progress import Progress
from stof_onnx.verify.definition import spell_out_attention
from stof_onnx.verify.session import Runner

Feed = dict[str, np.ndarray]
Run = Callable[[Feed], list[np.ndarray]]
# Largest difference, relative to the largest magnitude of the output: a few roundings of the dtype.
TOLERANCE = {"fp32": 2e-5, "fp16": 1e-2}
STATUSES = ("replaced", "dense", "refused", "missing")
LOWEST_BATCH, HIGHEST_BATCH = 1, 4


@dataclass
class SiteOutcome:
    """A declared attention and what became of it.

    replaced; dense (replaced, but a mask that depends on run-time padding is still a dense input); refused; missing.
    """

    name: str
    mask: str
    static: bool  # its mask is known offline, or it has none
    status: str = "missing"
    reason: str = ""
    assumed: bool = False  # refused, but replaced under --assume-no-empty-rows
    problem: str = ""  # it was replaced, but not by what was declared


@dataclass
class Outcome:
    """What became of one case. `export_error` means the exporter failed or wrote a file that does not run."""

    name: str
    revision: str = ""  # of the sources that it was seen with
    export_error: str = ""
    sites: list[SiteOutcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    worst: float = 0.0  # largest relative difference of the outputs
    seconds: dict[str, float] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)  # what peers make of it: '2 of 2', or what went wrong

    @property
    def errors(self) -> list[str]:
        """Everything that must not be: wrong masks, wrong results, sites that were not found."""
        missing = [f"{s.name}: not found" for s in self.sites if s.status == "missing"]
        return self.problems + missing + [f"{s.name}: {s.problem}" for s in self.sites if s.problem]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Outcome:
        return Outcome(**{**fields, "sites": [SiteOutcome(**site) for site in fields["sites"]]})


def evaluate(case: GridCase, folder: Path, exports: Path | None = None) -> Outcome:
    """Runs one case in `folder`; exceptions of the product count as problems. `exports` keeps the exported models."""
    torch.set_num_threads(1)
    outcome = Outcome(case.name)
    optimized = folder / "model.stof.onnx"
    start = time.perf_counter()
    try:
        model, info = export_case(case, exports or folder)
        samples = _samples(info, _runner(model, case))
    except ExportError as error:
        outcome.export_error = str(error)
    except Exception as error:
        message = re.sub(r"Load model from \S+ failed:\s*", "", str(error).splitlines()[0])
        outcome.export_error = f"ONNX Runtime does not run the exported file: {message[:240]}"
    outcome.seconds["export"] = time.perf_counter() - start
    if outcome.export_error:
        return outcome
    start = time.perf_counter()
    outcome.sites = [SiteOutcome(s.name, _label(s), not s.padding) for s in info.sites]
    try:
        options = OptimizeOptions(shapes=parse_shapes(_shapes(info)), seed=0)
        report = pipeline.optimize(model, optimized, options, Progress())
        outcome.seconds["optimize"] = time.perf_counter() - start
        if report.failed and report.verification is not None:
            outcome.problems += [f"verification: {line}" for line in report.verification.failures]
        written = onnx.load(str(optimized)) if optimized.exists() else None
        assumed: set[str] = set()
        if report.refused:
            assuming = pipeline.inspect(model, replace(options, assume_no_empty_rows=True), Progress())
            assumed = {site.name for site in assuming.sites}
        _settle_sites(outcome, info, report.to_json()["attention"], assumed, onnx.load(str(model)), written)
        if written is not None:
            _compare(outcome, case, samples, _runner(optimized, case))
    except Exception as error:
        outcome.problems.append(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
    outcome.seconds["total"] = outcome.seconds["export"] + time.perf_counter() - start
    return outcome


def _runner(path: Path, case: GridCase) -> Run:
    """Runs a file on ONNX Runtime; the file must load as it is in any case.

    float16 rounds after each operator, which that provider would not do; ONNX `Attention` runs by its definition, from
    which that provider's kernel departs in rows whose keys are all hidden.
    """
    _session(str(path))
    model = onnx.load(str(path))
    spell_out_attention(model)
    if case.options.dtype == "fp32":
        session = _session(model.SerializeToString())
        return lambda feed: session.run(None, feed)
    rounding = Runner(model, path.parent)
    return lambda feed: list(rounding.run(feed).values())


def _session(model: str | bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _shapes(info: ExportInfo) -> list[str]:
    """--shape arguments: every dynamic axis from its smallest to its largest size."""
    largest = {"batch": HIGHEST_BATCH, **info.max_dims}
    texts = []
    for spec in info.inputs:
        if any(isinstance(dim, str) for dim in spec.shape):
            sizes = [
                "x".join(str(dim if isinstance(dim, int) else choose(dim)) for dim in spec.shape)
                for choose in (
                    lambda dim: LOWEST_BATCH if dim == "batch" else info.dims[dim] - info.dims[dim] // 4,
                    lambda dim: info.dims[dim],
                    lambda dim: largest[dim],
                )
            ]
            texts.append(f"{spec.name}:{':'.join(sizes)}")
    return texts


def _samples(info: ExportInfo, run: Run) -> list[tuple[Feed, list[np.ndarray]]]:
    """Inputs and the original's outputs: unpadded, padded, and at other sizes where the exported file takes them."""
    rng = np.random.default_rng(1)
    dynamic = {dim for spec in info.inputs for dim in spec.shape if isinstance(dim, str)}
    feeds = [info.random_inputs(rng, padded=False), info.random_inputs(rng)]
    samples = [(feed, run(feed)) for feed in feeds]
    if dynamic:
        smaller = {dim: 1 if dim == "batch" else info.dims[dim] - 5 for dim in dynamic}
        larger = {dim: 3 if dim == "batch" else info.max_dims[dim] for dim in dynamic}
        for dims in (smaller, larger):
            feed = info.random_inputs(rng, dims)
            try:
                samples.append((feed, run(feed)))
            except Exception:  # the exporter has fixed the size at which it traced
                continue
    return samples


def _compare(
    outcome: Outcome,
    case: GridCase,
    samples: list[tuple[Feed, list[np.ndarray]]],
    run: Run,
) -> None:
    for feed, wanted in samples:
        sizes = {name: list(array.shape) for name, array in feed.items()}
        for want, got in zip(wanted, run(feed), strict=True):
            if want.shape != got.shape or not np.array_equal(np.isnan(want), np.isnan(got)):
                outcome.problems.append(f"another shape or other NaNs at {sizes}")
                continue
            want, got = want.astype(np.float64), got.astype(np.float64)
            scale = np.nanmax(np.abs(want), initial=0.0)
            difference = np.nanmax(np.abs(got - want), initial=0.0)
            worst = float(difference / scale) if scale else float(difference)
            outcome.worst = max(outcome.worst, worst)
            if worst > TOLERANCE[case.options.dtype]:
                outcome.problems.append(f"outputs differ by {worst:.2e} of their magnitude at {sizes}")


def _settle_sites(
    outcome: Outcome,
    info: ExportInfo,
    attention: dict[str, Any],
    assumed: set[str],
    original: onnx.ModelProto,
    optimized: onnx.ModelProto | None,
) -> None:
    """Pairs what was found with what was declared, both in execution order."""
    position = {node.name: index for index, node in enumerate(original.graph.node)}
    refused = {entry["node"]: entry["reason"] for entry in attention["refused"]}
    replaced = {entry["name"]: entry for entry in attention["sites"]}
    found = sorted([*refused, *replaced], key=lambda name: position.get(name, len(position)))
    if len(found) != len(info.sites):
        outcome.problems.append(f"{len(found)} sites found, {len(info.sites)} declared")
        return
    largest = {**info.dims, **info.max_dims}
    for declared, site, name in zip(info.sites, outcome.sites, found, strict=True):
        if name in refused:
            site.status, site.reason, site.assumed = "refused", refused[name], name in assumed
        else:
            site.status = "dense" if _dense(declared, replaced[name]) else "replaced"
            if optimized is not None:  # else verification failed, which is a problem of its own
                site.problem = _difference(declared, replaced[name], _node(optimized, name), optimized, largest)


def _node(model: onnx.ModelProto, site: str) -> onnx.NodeProto | None:
    nodes = [n for n in model.graph.node if n.name == f"{site}/StofAttention"]
    return nodes[0] if nodes else None


def _dense(declared: SiteInfo, site: dict[str, Any]) -> bool:
    return declared.padding and site["bias"] == "dense" != declared.bias


def _difference(
    declared: SiteInfo,
    site: dict[str, Any],
    node: onnx.NodeProto | None,
    model: onnx.ModelProto,
    largest: dict[str, int],
) -> str:
    """How the replacement differs from the declaration, "" when it does not."""
    if node is None:
        return "the optimized file has no such node"
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    wanted = {
        "heads": (declared.heads, site["heads"]),
        "kv_heads": (declared.kv_heads, site["kv_heads"]),
        "head_dim": (declared.head_dim, site["head_dim"]),
        "softcap": (declared.softcap, attributes["softcap"]),
        "bias": (declared.bias, site["bias"]),
        "run-time padding": (declared.padding, "runtime-padding" in site["mask"]),
    }
    for what, (want, got) in wanted.items():
        if want != got and not (_dense(declared, site) and what in ("bias", "run-time padding")):
            return f"{what} {got} instead of {want}"
    if _dense(declared, site):
        return ""  # the outputs are compared in any case
    mask = declared.expected_mask(largest)
    if not attributes["mask_seq_q"]:
        return "" if mask.all() else "no mask was found"
    stored = _decode(node, model, attributes)
    if stored.shape[-2:] != mask.shape[-2:]:
        return f"a mask of {stored.shape[-2:]} instead of {mask.shape[-2:]}"
    mask = mask if mask.ndim == 3 else mask[None]
    wrong = int((stored != mask[None]).sum())
    return f"{wrong} of {stored.size} mask elements are wrong" if wrong else ""


def _decode(node: onnx.NodeProto, model: onnx.ModelProto, attributes: dict[str, Any]) -> np.ndarray:
    """The mask in the node's arrays, bool [B or 1, H or 1, S_q, S_kv]."""
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    inputs = {name: arrays[node.input[3 + index]] for index, name in enumerate(ONNX_INPUTS)}
    sizes = (attributes["mask_seq_q"], attributes["mask_seq_kv"], attributes["tile_m"], attributes["tile_n"])
    return decode(EncodedMask.from_onnx_arrays(inputs, *sizes))


def _label(site: SiteInfo) -> str:
    parts = [_mask_label(site.mask)]
    if site.bias != "none":
        parts.append(f"{site.bias} bias")
    if site.softcap:
        parts.append("softcap")
    if site.padding:
        parts.append("padding")
    return " + ".join(parts)


def _mask_label(mask: MaskSpec | None) -> str:
    if mask is None:
        return "none"
    label = f"causal {mask.kind}" if mask.causal else mask.kind
    return f"{label} in {mask.band}" if mask.band else label
