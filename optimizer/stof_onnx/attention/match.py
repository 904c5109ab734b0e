"""Finds every attention of a model that is provably one StofAttention node.

Steps, one file each: anchors (where to look), values (softmax down to V), scores (softmax up to Q and K), movement and
heads (where Q, K, V come from and how they lie), output, recover (what the mask terms mean).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.absorb import Choice, applied, choices, of_match, of_products, widened
from stof_onnx.attention.anchors import is_softmax, leaving, scopes
from stof_onnx.attention.fused_ops import is_fused, match_fused
from stof_onnx.attention.heads import Placed
from stof_onnx.attention.readers import readers, vanish
from stof_onnx.attention.recover import recover
from stof_onnx.attention.scores import Scores, Stop, read_scores
from stof_onnx.attention.types import AttentionMatch, Recovered, Refusal, ScoreSite
from stof_onnx.attention.values import Values, reaches_product, read_values
from stof_onnx.graph.model import node_label
from stof_onnx.graph.scenarios import Family, build_family

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder
    from stof_onnx.graph.model import LoadedModel
    from stof_onnx.options import OptimizeOptions

UNREADABLE = "the site can not be read"  # the start of a reason that is a bug of ours
_log = logging.getLogger(__name__)
_FLOATS = {"float16", "bfloat16", "float32"}


def find_attention(model: LoadedModel, options: OptimizeOptions) -> tuple[list[AttentionMatch], list[Refusal]]:
    """Matches and refusals in graph order; edits nothing."""
    family = build_family(model)
    finder = _Finder(family, leaving(model.graph), options.assume_no_empty_rows)
    matches: list[AttentionMatch] = []
    refusals: list[Refusal] = []
    for graph in scopes(model.graph):
        for node in graph.nodes:
            found = finder.at(graph, node)
            if isinstance(found, AttentionMatch):
                matches.append(found)
            elif found is not None:
                refusals.append(found)
    return matches, refusals


class _Reject(Exception):
    def __init__(self, reason: str, node: gs.Node | None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


class _Finder:
    """Reads one site after another."""

    def __init__(self, family: Family, leaving: set[int], assume: bool) -> None:
        self.model, self.main, self.probes, self.unbounded = family.model, family.main, family.probes, family.unbounded
        self.leaving, self.assume = leaving, assume
        self._recovered: dict[tuple[object, ...], Recovered | Refusal] = {}

    def at(self, graph: gs.Graph, node: gs.Node) -> AttentionMatch | Refusal | None:
        """The match or refusal anchored at `node`; None where there is no attention."""
        if is_fused(node):
            found = match_fused(self.model, graph, node, self.main, self.probes, self.assume)
            return self._absorbed(found) if isinstance(found, AttentionMatch) and not found.prelude else found
        if not is_softmax(node):
            return None
        if _old(graph):
            return Refusal("a function at an operator set before 13", (node_label(node),), node_label(node))
        try:
            return self._softmax(graph, node)
        except _Reject as reject:
            blamed = reject.node if reject.node is not None else node
            return Refusal(reject.reason, (node_label(blamed),), node_label(node))
        except Exception as error:  # a graph nobody thought of must not stop the others from being replaced
            _log.warning("reading the attention at %s failed", node_label(node), exc_info=True)
            return Refusal(f"{UNREADABLE} ({type(error).__name__}: {error})", (node_label(node),), node_label(node))

    def _absorbed(self, match: AttentionMatch) -> AttentionMatch:
        """Transposes and expanded K/V around an operator that is an attention by itself."""
        own = of_match(match, self.main)
        found = [] if own is None else sorted(choices(own, self.leaving, self.main), key=lambda c: -c.gain)
        found = [c for c in found if not c.casts]
        for probe in self.probes:
            there = of_match(match, probe)
            keys = {c.key for c in choices(there, self.leaving, probe)} if there is not None else set()
            found = [c for c in found if c.key in keys]
        return applied(match, found[0]) if found else match

    def _softmax(self, graph: gs.Graph, softmax: gs.Node) -> AttentionMatch | Refusal | None:
        scores = read_scores(softmax.inputs[0], self.main)
        if isinstance(scores, Stop):
            if scores.harmless or not reaches_product(softmax):
                return None
            raise _Reject(scores.reason, scores.node)
        values = read_values(softmax, self.leaving, self.main)
        if isinstance(values, Stop):
            if not reaches_product(softmax) and not scores.terms and scores.scale == 1.0:
                return None
            raise _Reject(values.reason, values.node)
        shape = self.main.shape(softmax.inputs[0])
        if shape is None:
            raise _Reject("the sizes of the scores are not known", softmax)
        if softmax.attrs.get("axis", -1) not in (-1, len(shape) - 1):
            raise _Reject("the softmax is not over the keys", softmax)
        choice = self._choose(scores, values, softmax)
        self._private(scores, values, softmax, choice)
        return self._build(graph, softmax, scores, values, choice)

    def _private(self, scores: Scores, values: Values, softmax: gs.Node, choice: Choice) -> None:
        """Nothing else reads what would disappear."""
        gone = {id(n) for n in (*scores.nodes, softmax, *values.nodes, *choice.result.nodes)}
        for tensor in (*scores.tensors, *values.tensors):
            if id(tensor) in self.leaving:
                raise _Reject("the scores are an output of the graph", tensor.inputs[0])
            data, of_shape = readers(tensor)
            others = [n for n in data if id(n) not in gone]
            if others or not vanish(of_shape, gone, self.leaving):
                raise _Reject("the scores have another consumer", (others or of_shape)[0])

    def _choose(self, scores: Scores, values: Values, softmax: gs.Node) -> Choice:
        core = of_products(scores.product, values.product)
        found = sorted(choices(core, self.leaving, self.main), key=lambda c: -c.gain)
        if not found:
            raise _Reject("Q, K, V and the output have no common batch and head axes", scores.product.node)
        for probe in self.probes:
            again = read_scores(softmax.inputs[0], probe)
            below = read_values(softmax, self.leaving, probe)
            if isinstance(again, Stop) or isinstance(below, Stop):
                stop = again if isinstance(again, Stop) else below
                assert isinstance(stop, Stop)
                raise _Reject(f"at other sizes: {stop.reason}", stop.node)
            if (again.scale, again.softcap) != (scores.scale, scores.softcap):
                raise _Reject("the scale depends on the input's size", scores.product.node)
            there = of_products(again.product, below.product)
            keys = {c.key for c in choices(there, self.leaving, probe)}
            found = [c for c in found if c.key in keys]
        if not found:
            raise _Reject("how Q, K and V lie depends on the input's size", scores.product.node)
        return found[0]

    def _build(
        self, graph: gs.Graph, softmax: gs.Node, scores: Scores, values: Values, choice: Choice
    ) -> AttentionMatch | Refusal:
        q, k, v = choice.q, choice.k, choice.v
        name = node_label(softmax)
        dtype = choice.dtype
        if dtype.name not in _FLOATS:
            raise _Reject(f"attention in {dtype}", softmax)
        core = scores.product.node.outputs[0]
        sizes = (q.batch, q.query_heads, q.seq, k.seq)
        probe_sizes = tuple(_sizes(self._probe_shape(core, p), q, p) for p in self.probes)
        if q.seq == 1 and all(s[2] == 1 for s in probe_sizes):
            raise _Reject("one query at a time (decoding) is left to the runtime", softmax)
        masks = [t for t in scores.terms if t.kind != "cast"]
        if values.row_guard is not None and not (
            len(masks) == 1 and masks[0].kind == "add" and masks[0].tensor is values.row_guard and not masks[0].negate
        ):
            raise _Reject("rows are set to 0 by a test of something else than the mask", values.nodes[0])
        softmax_dtype = self.main.dtype(softmax.inputs[0])
        core_dtype = self.main.dtype(core)
        assert softmax_dtype is not None and core_dtype is not None
        site = ScoreSite(
            name,
            *sizes,
            dtype=core_dtype,
            softmax_dtype=softmax_dtype,
            nan_guard=values.nan_guard or values.row_guard is not None,
            assume_no_empty_rows=self.assume,
            probe_sizes=probe_sizes,
        )
        recovered = self._recover(scores, site)
        if isinstance(recovered, Refusal):
            return recovered
        moving = [s[2:] != sizes[2:] for s in probe_sizes]
        free = any(m and u for m, u in zip(moving, self.unbounded, strict=True))
        operands = [widened(p, dtype, self.main, f"{name}/{n}") for p, n in ((q, "q"), (k, "k"), (v, "v"))]
        return AttentionMatch(
            name=name,
            graph=graph,
            q=operands[0][0],
            k=operands[1][0],
            v=operands[2][0],
            prelude=tuple(node for _, nodes in operands for node in nodes),
            output=choice.result.tensor,
            q_layout=q.layout,
            k_layout=k.layout,
            v_layout=v.layout,
            o_layout=choice.result.layout,
            output_rank=choice.result.rank,
            num_heads=q.query_heads,
            num_kv_heads=k.heads,
            head_dim=q.dim,
            v_head_dim=v.dim,
            seq_q=0 if free else q.seq,
            seq_kv=0 if free else k.seq,
            dynamic_seq=any(moving),
            dtype=dtype,
            scale=scores.scale * q.source.scale * k.source.scale * recovered.scale_factor,
            softcap=scores.softcap,
            mask=recovered.mask,
            bias=recovered.bias,
            kv_mask=recovered.kv_mask,
            masked_row=recovered.masked_row,
            nodes=(*scores.nodes, softmax, *values.nodes, *choice.result.nodes),
            notes=recovered.notes,
            score_bound=recovered.score_bound,
            ranks=(len(q.source.shape), len(k.source.shape), len(v.source.shape)),
        )

    def _probe_shape(self, core: gs.Tensor, probe: Folder) -> tuple[int, ...]:
        shape = probe.shape(core)
        if shape is None:
            raise _Reject("the sizes of the scores are not known at other sizes of the input", core.inputs[0])
        return shape

    def _recover(self, scores: Scores, site: ScoreSite) -> Recovered | Refusal:
        """Layers that share their mask tensors share the work."""
        key = (
            tuple((t.kind, str(t.dtype), id(t.tensor), t.keep, t.fill, id(t.fill_tensor), t.negate, t.view and
                   self.main.shape(t.view)) for t in scores.terms),
            site.batch, site.heads, site.seq_q, site.seq_kv, str(site.dtype), str(site.softmax_dtype), site.nan_guard,
            site.probe_sizes,
        )  # fmt: skip
        if key not in self._recovered:
            self._recovered[key] = recover(scores.terms, site, self.main)
        found = self._recovered[key]
        if isinstance(found, Refusal):
            own = tuple(node_label(t.node) for t in scores.terms if t.node is not None)
            return Refusal(found.reason, found.nodes if site.name == found.site else own, site.name)
        return found


def _old(graph: gs.Graph) -> bool:
    """True in a function whose Softmax, Squeeze and so on have an older meaning."""
    imports = graph.import_domains if isinstance(graph, gs.Function) else None
    return any(e.domain in ("", "ai.onnx") and e.version < 13 for e in imports or ())


def _sizes(core: tuple[int, ...], q: Placed, probe: Folder) -> tuple[int, int, int, int]:
    total = int(np.prod(core[:-2]))
    return total // q.query_heads, q.query_heads, core[-2], core[-1]
