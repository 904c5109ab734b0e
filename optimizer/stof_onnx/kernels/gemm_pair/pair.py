"""Two matrix products in a row, as one kernel computes them: what it is, and its tensors.

    hidden = inner(x w1 + bias1)              [rows, hidden], rounded to the tensors' type, never in memory
    out = outer(hidden w2 + bias2) + residual [rows, width]

Products are summed in fp32, everything else is computed in fp32 and rounded once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from stof_onnx.errors import StofError

ACTIVATIONS = ("none", "relu", "gelu_erf", "gelu_tanh", "silu")
DTYPES = ("fp16", "bf16")
MULTIPLE = 8  # of every size: rows of 16 bytes
MOST_HIDDEN = 128  # a thread block holds all of them in registers, and is no faster than two kernels beyond
_MOST_SIZE = 1 << 16


@dataclass(frozen=True)
class GemmPair:
    """One pair of products.

    Attributes:
        depth: columns of x.
        hidden: columns between the products.
        width: columns of the output.
        dtype: of every tensor, "fp16" or "bf16".
        inner, outer: activations behind the first and the second product.
        inner_bias, outer_bias, residual: whether they are there.

    Raises:
        StofError: no kernel computes it.
    """

    depth: int
    hidden: int
    width: int
    dtype: str
    inner: str = "none"
    outer: str = "none"
    inner_bias: bool = False
    outer_bias: bool = False
    residual: bool = False

    def __post_init__(self) -> None:
        sizes = self.depth, self.hidden, self.width
        if any(n < MULTIPLE or n % MULTIPLE or n > _MOST_SIZE for n in sizes):
            raise StofError(f"sizes of {sizes} are not multiples of {MULTIPLE} up to {_MOST_SIZE}", "pair of GEMMs")
        if self.hidden > MOST_HIDDEN:
            raise StofError(f"{self.hidden} columns between the products, at most {MOST_HIDDEN} fit", "pair of GEMMs")
        if self.dtype not in DTYPES or self.inner not in ACTIVATIONS or self.outer not in ACTIVATIONS:
            what = f"{self.dtype}, {self.inner}, {self.outer}"
            raise StofError(f"a type or an activation is unknown: {what}", "pair of GEMMs")

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The inputs in their order: names, and sizes without those of rows."""
        return dict(self._inputs())

    def _inputs(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "x", (self.depth,)
        yield "w1", (self.depth, self.hidden)
        yield "w2", (self.hidden, self.width)
        if self.inner_bias:
            yield "bias1", (self.hidden,)
        if self.outer_bias:
            yield "bias2", (self.width,)
        if self.residual:
            yield "residual", (self.width,)

    def shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """The inputs in their order: names and shapes."""
        leading = {"x": (rows,), "residual": (rows,)}
        return {name: (*leading.get(name, ()), *sizes) for name, sizes in self.inputs.items()}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.__dict__, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> GemmPair:
        """What `to_json` wrote."""
        return GemmPair(**json.loads(text))
