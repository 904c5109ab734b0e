"""Activations as exporters write them, in the normal form of algebra.py: which one a product of factors is."""

from __future__ import annotations

import math

from stof_onnx.fusion.templates.algebra import Algebra

_ROOT_HALF, _TANH_SCALE, _TANH_CUBE = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715
NAMES = ("none", "relu", "gelu_erf", "gelu_tanh", "silu")


def activation_of(a: Algebra, coefficient: float, factors: tuple[int, ...]) -> tuple[str, int] | None:
    """The activation that `coefficient` times the product of `factors` is, and what it is applied to.

    relu(x) = max(x, 0); silu(x) = x sigmoid(x); gelu_erf(x) = x (1 + erf(x / √2)) / 2;
    gelu_tanh(x) = x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2. "none" when it is anything else.
    """
    if len(factors) == 1 and a.close(coefficient, 1.0):
        form = a.form(factors[0])
        if form[0] in ("relu", "gelu_erf", "gelu_tanh"):
            return str(form[0]), form[1]  # type: ignore[return-value]
        return "none", factors[0]
    for i, factor in enumerate(factors):
        rest = factors[:i] + factors[i + 1 :]
        if len(rest) != 1:
            return None
        x, form = rest[0], a.form(factor)
        if form[0] == "sigmoid" and form[1] == x and a.close(coefficient, 1.0):
            return "silu", x
        if a.close(coefficient, 0.5) and (name := _gelu(a, factor, x)):
            return name, x
    return None


def _gelu(a: Algebra, gate: int, x: int) -> str:
    """Whether `gate` is 1 + erf or 1 + tanh of the right thing."""
    constant, terms = a.terms(gate)
    if not a.close(constant, 1.0) or len(terms) != 1 or not a.close(terms[0][0], 1.0):
        return ""
    form = a.form(terms[0][1])
    if form[0] == "erf":
        return "gelu_erf" if _is_scaled(a, form[1], x, _ROOT_HALF) else ""  # type: ignore[arg-type]
    if form[0] == "tanh":
        return "gelu_tanh" if _is_tanh_argument(a, form[1], x) else ""  # type: ignore[arg-type]
    return ""


def _is_scaled(a: Algebra, e: int, x: int, scale: float) -> bool:
    coefficient, factors = a.factors(e)
    return factors == (x,) and a.close(coefficient, scale)


def _is_tanh_argument(a: Algebra, e: int, x: int) -> bool:
    """√(2/π) (x + 0.044715 x³), also as √(2/π) x (1 + 0.044715 x²)."""
    outer, factors = a.factors(e)
    if len(factors) == 1 and a.close(outer, _TANH_SCALE):
        cube = a.multiply(x, x, x)
        coefficients = [c for c, term in a.terms(factors[0])[1] if term == cube]
        found = bool(coefficients) and a.add((1.0, x), (coefficients[0], cube)) == factors[0]
        return found and a.close(coefficients[0], _TANH_CUBE)
    if len(factors) == 2 and x in factors:
        constant, terms = a.terms(factors[0] if factors[1] == x else factors[1])
        square = a.multiply(x, x)
        known = len(terms) == 1 and terms[0][1] == square and a.close(outer * constant, _TANH_SCALE)
        return known and a.close(outer * terms[0][0], _TANH_SCALE * _TANH_CUBE)
    return False
