"""Comparison of each attention on sampled query rows, where the whole models would take too much memory.

Each site is cut out of both models at Q, K and V, which get random values; everything that its mask and bias are made
of is computed by the model's own nodes. Then only some rows of Q, and the same rows of every mask and bias, go through
the site itself. All keys take part, so each sampled row is exactly what the whole model would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from stof_onnx.attention.types import Layout
from stof_onnx.errors import StofError
from stof_onnx.graph.proto_shapes import infer_shapes
from stof_onnx.graph.walk import used_names
from stof_onnx.options import OptimizeOptions
from stof_onnx.verify import judge
from stof_onnx.verify.compare import Side, SiteProbe, same_interface
from stof_onnx.verify.extract import extract, needed_nodes
from stof_onnx.verify.result import OutputError, Verification
from stof_onnx.verify.samples import Sample
from stof_onnx.verify.session import Runner

METHOD = "sites on sampled rows"  # as a Verification calls it
_ROWS = 64  # sampled query rows of each site
_ELEMENTWISE = {
    "Add", "Sub", "Mul", "Div", "Where", "Cast", "Softmax", "IsNaN", "Identity", "Dropout", "Tanh", "Max", "Min",
}  # fmt: skip
_ARRAYS = 7  # inputs of a StofAttention node that hold the encoded mask, after Q, K and V
_FACTORS = 3


@dataclass(frozen=True)
class _Core:
    """The nodes from Q @ K^T to the product with V, or the one fused node: queries are [..., rows, d] in `left`."""

    left: str
    right: str
    values: str
    output: str
    nodes: list[onnx.NodeProto]
    sides: list[str]  # what else those nodes read


def compare_rows(
    original: Side,
    optimized: Side,
    sites: Sequence[SiteProbe],
    samples: Sequence[Sample],
    seed: int | None,
    options: OptimizeOptions,
) -> Verification:
    """Compares every site on sampled rows for each sample's run-time inputs.

    Raises:
        StofError: a site whose nodes can not be cut into rows.
    """
    same_interface(original.proto, optimized.proto)
    result = Verification(METHOD, judge.rule(options.atol, options.rtol), seed)
    result.notes.append(f"too large for the whole models: {_ROWS} query rows of each attention were compared instead")
    if any(np.isfinite(site.score_bound) for site in sites):
        result.notes.append("the scores were not measured against the bound of the finite mask constants")
    rng = np.random.default_rng(seed)
    for sample in samples:
        result.samples.append(sample.what)
        dims = infer_shapes(original.proto, {name: value.shape for name, value in sample.feeds.items()}).dims
        of_inputs = max((v.shape[0] for v in sample.feeds.values() if v.ndim), default=1)
        for site in sites:
            error = result.sites.setdefault(site.name, OutputError(site.output, ""))
            inferred = next(iter(dims.get(site.q, ())), None)  # of windows, for instance, there are several an entry
            batch = inferred if isinstance(inferred, int) else of_inputs
            _compare_site(original, optimized, site, sample, batch, rng, error, options)
    return result


def _compare_site(
    original: Side,
    optimized: Side,
    site: SiteProbe,
    sample: Sample,
    batch: int,
    rng: np.random.Generator,
    error: OutputError,
    options: OptimizeOptions,
) -> None:
    rows = _sample_rows(site.seq_q, rng)
    feeds = dict(sample.feeds)
    dtype = np.dtype(np.float32) if site.dtype.name == "bfloat16" else site.dtype  # as the models were converted
    for name, heads, length, dim, layout, rank in (
        (site.q, site.num_heads, site.seq_q, site.head_dim, site.q_layout, site.ranks[0]),
        (site.k, site.num_kv_heads, site.seq_kv, site.head_dim, site.k_layout, site.ranks[1]),
        (site.v, site.num_kv_heads, site.seq_kv, site.v_head_dim, site.v_layout, site.ranks[2]),
    ):
        values = rng.standard_normal((batch, heads, length, dim)).astype(dtype)
        feeds[name] = _in_layout(values, layout, rank)
    want = _original_rows(original, site, feeds, rows)
    got = _optimized_rows(optimized, site, feeds, rows)
    error.dtype = str(want.dtype)
    if got.size != want.size:
        raise StofError("its batch size is not known: too large to compare", f"attention '{site.name}'", _ADVICE)
    judge.compare(error, want, got.reshape(want.shape), lambda: None, options.atol, options.rtol)


def _sample_rows(length: int, rng: np.random.Generator) -> np.ndarray:
    """First and last rows, those around tile bounds, and random ones."""
    edges = [0, 1, 63, 64, 65, length // 2, length - 2, length - 1]
    chosen = {r for r in edges if 0 <= r < length} | set(rng.choice(length, min(length, _ROWS), replace=False).tolist())
    return np.array(sorted(chosen), np.int64)


def _in_layout(values: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    if layout is Layout.BHSD:
        return values
    batch, _, length, _ = values.shape
    moved = np.ascontiguousarray(values.transpose(0, 2, 1, 3))
    return moved.reshape(batch, length, -1) if rank == 3 else moved


def _original_rows(side: Side, site: SiteProbe, feeds: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """[batch, heads, rows, v_head_dim] by the original's own nodes."""
    graph = side.proto.graph
    core = _find_core(graph, site)
    wanted = [core.left, core.right, core.values, *core.sides]
    tensors = _evaluate(side, wanted, feeds)
    inner = {core.left: np.take(tensors[core.left], rows, axis=-2)}
    inner |= {name: tensors[name] for name in (core.right, core.values)}
    inner |= {name: _take_rows(tensors[name], rows, site.seq_q) for name in core.sides}
    out = Runner(extract(side.proto, core.nodes, inner, [core.output]), side.base_dir).run(inner)[core.output]
    return out if out.ndim == 4 else _to_heads(out, site.num_heads)


def _optimized_rows(side: Side, site: SiteProbe, feeds: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """The same by the node that replaced it."""
    graph = side.proto.graph
    makers = {name: n for n in graph.node for name in n.output}
    node = makers.get(site.output)
    if node is not None and node.op_type == "Reshape":  # to [B * S, H * D]
        node = makers.get(node.input[0])
    if node is None or node.domain != "stof":
        raise StofError("it is not the output of a StofAttention node", f"attention '{site.name}'", _ADVICE)
    side_inputs = list(node.input[_FACTORS + _ARRAYS :])
    tensors = _evaluate(side, side_inputs, feeds)
    inner = {name: _take_rows(tensors[name], rows, site.seq_q) for name in side_inputs}
    axis = 2 if site.q_layout is Layout.BHSD else 1
    inner |= {site.q: np.take(feeds[site.q], rows, axis=axis), site.k: feeds[site.k], site.v: feeds[site.v]}
    out = Runner(extract(side.proto, [node], inner, [node.output[0]]), side.base_dir).run(inner)[node.output[0]]
    return out if site.o_layout is Layout.BHSD else _to_heads(out, site.num_heads)


def _to_heads(out: np.ndarray, heads: int) -> np.ndarray:
    """[batch, rows, heads * d] or [batch, rows, heads, d] as [batch, heads, rows, d]."""
    return out.reshape(*out.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _take_rows(values: np.ndarray, rows: np.ndarray, length: int) -> np.ndarray:
    if values.ndim >= 2 and values.shape[-2] == length and length > 1:
        return np.take(values, rows, axis=-2)
    return values


def _evaluate(side: Side, names: Sequence[str], feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of the model when those in `feeds` are given."""
    found = {name: feeds[name] for name in names if name in feeds}
    missing = [name for name in dict.fromkeys(names) if name not in feeds]
    if missing:
        nodes = needed_nodes(side.proto.graph, missing, feeds)
        found |= Runner(extract(side.proto, nodes, feeds, missing), side.base_dir).run(feeds)
    return found


_ADVICE = "Pass --no-verify, or smaller sizes with --shape"


def _has_rows(node: onnx.NodeProto) -> bool:
    """FusedMatMul whose left factor has the rows of its result in the same axis."""
    moved = ("transA", "transBatchA", "transBatchB")
    return node.op_type == "FusedMatMul" and not any(a.name in moved and a.i for a in node.attribute)


def _find_core(graph: onnx.GraphProto, site: SiteProbe) -> _Core:
    """The two products of the site and what lies between them.

    Raises:
        StofError: it has another form (rank 3 views, a fused operator with a causal flag): its rows can not be cut out.
    """
    where = f"attention '{site.name}'"
    nodes = needed_nodes(graph, [site.output], [site.q, site.k, site.v])
    fused = next((n for n in nodes if n.op_type == "Attention" and n.domain in ("", "ai.onnx")), None)
    if fused is not None and not any(a.name == "is_causal" and a.i for a in fused.attribute):
        left, right, values, *sides = fused.input
        return _Core(left, right, values, fused.output[0], [fused], [n for n in sides if n])
    reach = {name: {name} for name in (site.q, site.k, site.v)}
    first = second = None
    between: list[onnx.NodeProto] = []
    inside: set[str] = set()
    for node in nodes:
        sources: set[str] = set().union(*(reach.get(n, set()) for n in used_names([node])))
        product = node.op_type == "MatMul" or _has_rows(node)
        if product and sources == {site.q, site.k} and first is None:
            first = node
            inside.update(node.output)
        elif product and first is not None and node.input[0] in inside and site.v in sources:
            second = node
            break
        elif first is not None and any(n in inside for n in node.input):
            if node.op_type not in _ELEMENTWISE:
                raise StofError(f"{node.op_type} lies between its products: too large to compare", where, _ADVICE)
            between.append(node)
            inside.update(node.output)
        for name in node.output:
            reach[name] = sources
    if first is None or second is None or site.q not in reach.get(first.input[0], {first.input[0]}):
        raise StofError("its two products were not found: too large to compare", where, _ADVICE)
    chosen = [first, *between, second]
    left, right, values = first.input[0], first.input[1], second.input[1]
    sides = [n for node in between for n in node.input if n and n not in inside]
    return _Core(left, right, values, second.output[0], chosen, list(dict.fromkeys(sides)))
