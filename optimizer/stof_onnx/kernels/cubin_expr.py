"""Whole-number expressions over the sizes of a node's inputs: output shapes, launch geometry, workspace.

Only what TensorRT's own shape expressions can say, so that one program serves both: constants, sizes, + - · max min,
and divisions that round down or up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stof_onnx.errors import StofError

# Numbers of the binary form: kernels/cubin_program.py and trt_plugins/src/cubin_program.cpp.
CONSTANT, SIZE = 0, 1
BINARY = {"+": 2, "-": 3, "*": 4, "//": 5, "ceil_div": 6, "max": 7, "min": 8}


@dataclass(frozen=True)
class Expr:
    """A constant (`left`), the size of axis `right` of input `left`, or an operation on two expressions."""

    op: str
    left: Expr | int
    right: Expr | int = 0

    def __add__(self, other: Expr | int) -> Expr:
        return binary("+", self, other)

    def __sub__(self, other: Expr | int) -> Expr:
        return binary("-", self, other)

    def __mul__(self, other: Expr | int) -> Expr:
        return binary("*", self, other)

    def __floordiv__(self, other: Expr | int) -> Expr:
        return binary("//", self, other)

    def ceil_div(self, other: Expr | int) -> Expr:
        return binary("ceil_div", self, other)

    def evaluate(self, shapes: Sequence[Sequence[int]]) -> int:
        """The value at given shapes of the inputs."""
        if self.op == "constant":
            return _number(self.left)
        if self.op == "size":
            return shapes[_number(self.left)][_number(self.right)]
        assert isinstance(self.left, Expr) and isinstance(self.right, Expr)
        return apply(self.op, self.left.evaluate(shapes), self.right.evaluate(shapes))


def constant(value: int) -> Expr:
    """A number, below 2^63 in size."""
    return Expr("constant", value)


def size(tensor: int, axis: int) -> Expr:
    """The size of an axis of an input."""
    return Expr("size", tensor, axis)


def binary(op: str, left: Expr | int, right: Expr | int) -> Expr:
    """`left op right`; operations on constants are done here, and what changes nothing is left out."""
    left = constant(left) if isinstance(left, int) else left
    right = constant(right) if isinstance(right, int) else right
    if left.op == right.op == "constant":
        return constant(apply(op, _number(left.left), _number(right.left)))
    if right == constant(1) and op in ("*", "//", "ceil_div"):
        return left
    if right == constant(0) and op in ("+", "-"):
        return left
    return Expr(op, left, right)


def apply(op: str, left: int, right: int) -> int:
    """One operation on numbers.

    Raises:
        StofError: a division by what is not positive.
    """
    if op in ("//", "ceil_div") and right <= 0:
        raise StofError(f"divides by {right}", "shape expression")
    results = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "//": lambda: left // right,
        "ceil_div": lambda: -(-left // right),
        "max": lambda: max(left, right),
        "min": lambda: min(left, right),
    }
    return results[op]()


def _number(value: Expr | int) -> int:
    assert isinstance(value, int)
    return value
