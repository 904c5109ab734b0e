"""`norm`: LayerNorm or RMSNorm of x + bias + residual, written as one operator or as exporters take it apart.

LayerNorm(s) = (s - mean s) / √(mean (s - mean s)² + ε) · scale + shift, RMSNorm(s) = s / √(mean s² + ε) · scale, over
the last axis. Where something else reads the sum s as well, it is the second output (pre-norm models keep it as the
residual).
"""

from __future__ import annotations

from dataclasses import dataclass

from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates.algebra import FULL, VECTOR, Algebra
from stof_onnx.fusion.templates.gemm import rows_of
from stof_onnx.fusion.templates.types import Instance, NoMatch

_MULTIPLE = 8


@dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm of `source`; empty names where scale or shift is absent."""

    kind: str
    source: int
    epsilon: float
    scale: str = ""
    shift: str = ""


def norm(segment: Segment, a: Algebra) -> Instance | NoMatch:
    """The norm of a sum, and the sum where it is read elsewhere."""
    expressions = {name: a.of(name) for name in segment.outputs}
    for output, e in expressions.items():
        found = norm_of(a, e)
        if found is not None:
            return _instance(segment, a, output, found, {n: x for n, x in expressions.items() if n != output})
    return NoMatch("it is neither a LayerNorm nor an RMSNorm")


def _instance(segment: Segment, a: Algebra, output: str, found: Norm, others: dict[str, int]) -> Instance | NoMatch:
    if len(others) > 1 or any(e != found.source for e in others.values()):
        return NoMatch("something else than the normalised tensor and the sum is read outside")
    constant, terms = a.terms(found.source)
    full = [a.form(t)[1] for c, t in terms if a.form(t)[0] == "input" and a.shapes[t].kind == FULL and c == 1.0]
    bias = [a.form(t)[1] for c, t in terms if a.form(t)[0] == "input" and a.shapes[t].kind == VECTOR and c == 1.0]
    if constant or len(full) + len(bias) != len(terms) or len(bias) > 1 or not 1 <= len(full) <= 2:
        return NoMatch("what is normalised is not the sum of one or two tensors and a bias")
    if others and len(terms) < 2:
        return NoMatch("its input is read through a copy outside")
    x, *residual = (str(name) for name in full)
    names = [x, *map(str, bias), *residual, *filter(None, (found.scale, found.shift))]
    width = a.shapes[a.of(x)].width
    if width % _MULTIPLE:
        return NoMatch(f"rows of {width} elements: it must be a multiple of {_MULTIPLE}")
    if len({a.leading(name) for name in (x, *residual, output, *others)}) > 1:
        return NoMatch("its outputs have other leading axes than its inputs")
    attributes: dict[str, int | float | str] = {
        "kind": found.kind,
        "epsilon": found.epsilon,
        "has_bias": len(bias),
        "has_residual": len(residual),
        "has_scale": int(bool(found.scale)),
        "has_shift": int(bool(found.shift)),
        "keep_sum": len(others),
    }
    rows, rank = rows_of(segment.block.tensors.opt(x)), 1 + len(a.leading(output))
    vectors = tuple(name for name in names if a.shapes[a.of(name)].kind == VECTOR)
    outputs = (output, *others)
    return Instance("norm", tuple(names), outputs, attributes, a.dtype, rows, width, width, rank, vectors=vectors)


def norm_of(a: Algebra, e: int) -> Norm | None:
    """The norm that an expression is."""
    form = a.form(e)
    if form[0] == "layer_norm":
        _, source, *vectors, epsilon = form
        scale, shift = (*(str(a.form(v)[1]) for v in vectors), "", "")[:2]  # type: ignore[arg-type]
        return Norm("layer_norm", source, float(epsilon), scale, shift)  # type: ignore[arg-type]
    constant, terms = a.terms(e)
    if constant:
        return None
    if len(terms) == 2:
        for (c, term), (d, vector) in (terms, terms[::-1]):
            if d == 1.0 and a.form(vector)[0] == "input" and a.shapes[vector].kind == VECTOR:
                found = _normal(a, c, term)
                if found is not None and found.kind == "layer_norm":
                    return Norm(found.kind, found.source, found.epsilon, found.scale, str(a.form(vector)[1]))
        return None
    return _normal(a, *terms[0]) if len(terms) == 1 else None


def _normal(a: Algebra, coefficient: float, term: int) -> Norm | None:
    """The product of what is normalised, 1 / √(mean square + ε), and scale."""
    inner, factors = a.factors(term)
    if coefficient * inner != 1.0:
        return None
    for i, factor in enumerate(factors):
        found = _root_mean_square(a, factor)
        if found is None:
            continue
        source, epsilon = found
        rest = list(factors[:i] + factors[i + 1 :])
        if source not in rest:
            return None
        rest.remove(source)
        if len(rest) > 1 or (rest and (a.form(rest[0])[0] != "input" or a.shapes[rest[0]].kind != VECTOR)):
            return None
        scale = str(a.form(rest[0])[1]) if rest else ""
        centred = _centred(a, source)
        if centred is not None:
            return Norm("layer_norm", centred, epsilon, scale)
        return Norm("rms_norm", source, epsilon, scale)
    return None


def _root_mean_square(a: Algebra, e: int) -> tuple[int, float] | None:
    """1 / √(mean s² + ε) as (s, ε)."""
    form = a.form(e)
    root = a.form(form[1]) if form[0] == "inverse" else ("",)  # type: ignore[arg-type]
    if root[0] != "sqrt":
        return None
    epsilon, terms = a.terms(root[1])  # type: ignore[arg-type]
    if len(terms) != 1 or terms[0][0] != 1.0 or a.form(terms[0][1])[0] != "mean" or epsilon < 0:
        return None
    square = a.form(a.form(terms[0][1])[1])  # type: ignore[arg-type]
    if square[0] != "product" or len(square[1]) != 2 or square[1][0] != square[1][1]:  # type: ignore[arg-type, index]
        return None
    return square[1][0], epsilon  # type: ignore[index]


def _centred(a: Algebra, e: int) -> int | None:
    """s − mean s as s."""
    constant, terms = a.terms(e)
    means = [t for c, t in terms if c == -1.0 and a.form(t)[0] == "mean"]
    if constant or len(means) != 1:
        return None
    source: int = a.form(means[0])[1]  # type: ignore[assignment]
    return source if a.add((1.0, source), (-1.0, means[0])) == e else None
