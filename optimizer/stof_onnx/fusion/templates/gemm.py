"""GEMM templates: `gemm_epilogue`, activation(x w + b) + residual, and `gated_mlp`, activation(x w + b) · (x w2 + b2).

Both need constant weights whose sizes are multiples of 8, and an output with the leading axes of x. What is proven is
that the segment's output is that function of its inputs in real numbers; the kernels sum and finish in fp32 and round
once, where the original rounds after every operator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stof_onnx.fusion.projections import projections_of
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates.activations import activation_of
from stof_onnx.fusion.templates.algebra import FULL, VECTOR, Algebra
from stof_onnx.fusion.templates.types import Instance, NoMatch, Template

Attributes = dict[str, int | float | str]
MULTIPLE = 8


@dataclass(frozen=True)
class Product:
    """As `Linear`, of an expression x."""

    x: int
    weight: str
    transposed: bool
    bias: str = ""
    residual: str = ""


@dataclass(frozen=True)
class Linear:
    """x w + bias + residual; empty names where a part is absent."""

    x: str
    weight: str
    transposed: bool
    bias: str = ""
    residual: str = ""


def gemm_epilogue(segment: Segment, a: Algebra) -> Instance | NoMatch:
    """activation(x w + bias) + residual, each part but the product optional."""
    activated = with_activation(a, a.of(segment.outputs[0]))
    if isinstance(activated, NoMatch):
        return activated
    name, found = activated
    x = a.form(found.x)
    if x[0] != "input":
        return NoMatch("something is computed ahead of the GEMM")
    inputs = [str(x[1]), found.weight, *filter(None, (found.bias, found.residual))]
    attributes: Attributes = {
        "activation": name,
        "has_bias": int(bool(found.bias)),
        "has_residual": int(bool(found.residual)),
    }
    turned = (found.transposed,)
    return _instance(segment, a, "gemm_epilogue", inputs, attributes, turned)


def with_activation(a: Algebra, e: int) -> tuple[str, Product] | NoMatch:
    """An expression as activation(x w + bias) + residual: the activation, and the rest."""
    name, inner = activation_of(a, *a.factors(e)) or ("none", e)
    residual = ""
    if name == "none" and (split := _outer_residual(a, e)) is not None:
        name, inner, residual = split
    found = product(a, inner)
    if isinstance(found, NoMatch):
        return found
    if found.residual and (residual or name != "none"):
        return NoMatch("something is added ahead of the activation")
    return name, replace(found, residual=residual or found.residual)


def gated_mlp(segment: Segment, a: Algebra) -> Instance | NoMatch:
    """activation(x w_gate + b_gate) · (x w_up + b_up)."""
    coefficient, factors = a.factors(a.of(segment.outputs[0]))
    reason = NoMatch("it is no product of two GEMMs of one input, one of them activated")
    for i, factor in enumerate(factors):
        up = linear(a, factor)
        if isinstance(up, NoMatch) or up.residual:
            continue
        found = activation_of(a, coefficient, factors[:i] + factors[i + 1 :])
        gate = linear(a, found[1]) if found else reason
        if found is None or isinstance(gate, NoMatch) or gate.residual or gate.x != up.x:
            continue
        if bool(gate.bias) != bool(up.bias):
            return NoMatch("one of the two GEMMs has a bias and the other has none")
        biases = [gate.bias, up.bias] if gate.bias else []
        attributes: Attributes = {"activation": found[0], "has_bias": int(bool(biases))}
        turned = (gate.transposed, up.transposed)
        return _instance(segment, a, "gated_mlp", [gate.x, gate.weight, up.weight, *biases], attributes, turned)
    return reason


def projections(segment: Segment, a: Algebra) -> Instance | NoMatch:
    """Q, K and V of one attention from one input: one GEMM on packed weights."""
    found = projections_of(segment)
    if found is None or {o.index for o in found.operators} != {o.index for o in segment.operators}:
        return NoMatch("it is not all that makes Q, K and V of one attention by GEMMs of one input")
    leading = {a.leading(name) for name in (found.x, *found.outputs)}
    if len(leading) > 1 or any(n % MULTIPLE for n in (found.depth, *found.widths)):
        return NoMatch(f"its sizes are no multiples of {MULTIPLE}, or its leading axes differ")
    inputs = (found.x, *found.weights, *found.biases)
    attributes: Attributes = {"has_bias": int(bool(found.biases))}
    rows, rank = rows_of(segment.block.tensors.opt(found.x)), 1 + len(leading.pop())
    width = sum(found.widths)
    return Instance("projections", inputs, found.outputs, attributes, a.dtype, rows, width, found.depth, rank)


def _outer_residual(a: Algebra, e: int) -> tuple[str, int, str] | None:
    """activation(inner) + residual as (activation, inner, residual); None when it is not that, or has no activation."""
    constant, terms = a.terms(e)
    if constant or len(terms) != 2:
        return None
    for (scale, term), (other_scale, other) in (terms, terms[::-1]):
        form = a.form(other)
        if other_scale != 1.0 or form[0] != "input" or a.shapes[other].kind != FULL:
            continue
        coefficient, factors = a.factors(term)
        found = activation_of(a, scale * coefficient, factors)
        if found is not None and found[0] != "none":
            return found[0], found[1], str(form[1])
    return None


def linear(a: Algebra, e: int) -> Linear | NoMatch:
    """An expression as x w + bias + residual of a tensor x."""
    found = product(a, e)
    if isinstance(found, NoMatch):
        return found
    x = a.form(found.x)
    if x[0] != "input":
        return NoMatch("something is computed ahead of the GEMM")
    return Linear(str(x[1]), found.weight, found.transposed, found.bias, found.residual)


def product(a: Algebra, e: int) -> Product | NoMatch:
    """An expression as x w + bias + residual, whatever x is."""
    constant, terms = a.terms(e)
    if constant or any(coefficient != 1.0 for coefficient, _ in terms):
        return NoMatch("its GEMM is scaled, or a number is added")
    found: dict[str, str | bool | int] = {}
    for _, term in terms:
        form, kind = a.form(term), a.shapes[term].kind
        if form[0] == "matmul":
            x = int(form[1])  # type: ignore[call-overload]
            parts: dict[str, str | bool | int] = {"x": x, "weight": str(form[2]), "transposed": bool(form[3])}
        elif form[0] == "input" and kind == VECTOR:
            parts = {"bias": str(form[1])}
        elif form[0] == "input" and kind == FULL:
            parts = {"residual": str(form[1])}
        else:
            return NoMatch("what is added to the GEMM is neither a bias nor a tensor of its output's size")
        if found.keys() & parts.keys():
            return NoMatch("two GEMMs, or two biases, or two tensors are added")
        found |= parts
    if "x" not in found:
        return NoMatch("there is no GEMM")
    return Product(**found)  # type: ignore[arg-type]


def _instance(
    segment: Segment,
    a: Algebra,
    template: Template,
    inputs: list[str],
    attributes: Attributes,
    transposed: tuple[bool, ...],
) -> Instance | NoMatch:
    tensors, output = segment.block.tensors, segment.outputs[0]
    if a.leading(inputs[0]) != a.leading(output):
        return NoMatch("its output has other leading axes than its input")
    width, depth = a.shapes[a.of(output)].width, a.shapes[a.of(inputs[0])].width
    if width % MULTIPLE or depth % MULTIPLE:
        return NoMatch(f"a weight of {depth} x {width}: both must be multiples of {MULTIPLE}")
    rows = rows_of(tensors.opt(inputs[0]))
    rank = 1 + len(a.leading(output))
    return Instance(template, tuple(inputs), (output,), attributes, a.dtype, rows, width, depth, rank, transposed)


def rows_of(shape: tuple[int, ...] | None) -> int:
    """The product of the leading axes; 0 where they are not known."""
    rows = 1
    for size in shape[:-1] if shape else (0,):
        rows *= size
    return rows
