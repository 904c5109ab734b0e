"""Reads MatMul, Gemm, Einsum and FusedMatMul alike: two operands, their axes, and how the result lies.

Contract: `Product.left_view(view)` and `right_view` turn the index map of an operand into the canonical
[batch..., rows, inner] and [batch..., columns, inner], batch axes broadcast to `batch`; the node's result is the
canonical [batch..., rows, columns] transposed by `perm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs
from stof_onnx.attention.movement import is_standard
from stof_onnx.attention.views import View

if TYPE_CHECKING:
    from stof_onnx.graph.fold import Folder

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Product:
    """One matrix product in the form of an Einsum over letters (batch letters, then m, n; c is summed over)."""

    node: gs.Node
    left: gs.Tensor
    right: gs.Tensor
    left_letters: str
    right_letters: str
    batch_letters: str
    m: str
    n: str
    c: str
    perm: tuple[int, ...]
    batch: tuple[int, ...]
    alpha: float = 1.0

    def left_view(self, view: View) -> View | None:
        return self._canonical(view, self.left_letters, self.m, self.c)

    def right_view(self, view: View) -> View | None:
        return self._canonical(view, self.right_letters, self.n, self.c)

    def values_view(self, view: View) -> View | None:
        """The right operand as [batch..., inner, columns]: V, whose rows are the keys."""
        return self._canonical(view, self.right_letters, self.c, self.n)

    def _canonical(self, view: View, letters: str, rows: str, last: str) -> View | None:
        if len(letters) != len(view.axes):
            return None
        axes = [view.axes[letters.index(x)] if x in letters else ((1, 0),) for x in (*self.batch_letters, rows, last)]
        ordered = View(tuple(axes), view.offset)
        return ordered.expand((*self.batch, *ordered.shape[-2:]))


def is_product(node: gs.Node) -> bool:
    """True for the operators that `read_product` knows."""
    if is_standard(node):
        return node.op in ("MatMul", "Gemm", "Einsum")
    return node.domain == "com.microsoft" and node.op == "FusedMatMul"


def read_product(node: gs.Node, folder: Folder) -> Product | None:
    """The product that `node` computes; None when its operands or axes are not those of one matrix product."""
    if len(node.inputs) < 2 or any(folder.shape(t) is None for t in node.inputs[:2]):
        return None
    if node.op == "Einsum":
        return _einsum(node, folder)
    left, right = node.inputs[:2]
    rank_a, rank_b = len(folder.shape(left) or ()), len(folder.shape(right) or ())
    if rank_a < 2 or rank_b < 2:
        return None
    trans_a = trans_b = False
    alpha = float(node.attrs.get("alpha", 1.0))
    if node.op == "Gemm":
        if len(node.inputs) > 2 and not node.inputs[2].is_empty() and node.attrs.get("beta", 1.0) != 0:
            return None
        trans_a, trans_b = bool(node.attrs.get("transA", 0)), bool(node.attrs.get("transB", 0))
    elif node.op == "FusedMatMul":
        if node.attrs.get("transBatchA", 0) or node.attrs.get("transBatchB", 0):
            return None
        trans_a, trans_b = bool(node.attrs.get("transA", 0)), bool(node.attrs.get("transB", 0))
    batch = _LETTERS[: max(rank_a, rank_b) - 2]
    m, n, c = "XYZ"
    a = batch[len(batch) - (rank_a - 2) :] + (c + m if trans_a else m + c)
    b = batch[len(batch) - (rank_b - 2) :] + (n + c if trans_b else c + n)
    return _product(node, a, b, batch + m + n, m, n, c, alpha, folder)


def _einsum(node: gs.Node, folder: Folder) -> Product | None:
    equation = str(node.attrs["equation"]).replace(" ", "")
    if len(node.inputs) != 2 or "->" not in equation:
        return None
    inputs, out = equation.split("->")
    a, b = inputs.split(",")
    ranks = [len(folder.shape(t) or ()) for t in node.inputs]
    a, b, out = _without_ellipsis(a, b, out, ranks)
    if any(len(set(x)) != len(x) for x in (a, b, out)):
        return None
    summed = [x for x in a if x in b and x not in out]
    columns = [x for x in b if x not in a and x in out]
    if len(summed) != 1 or len(columns) != 1 or any(x not in a + b for x in out) or len(out) < 2:
        return None
    (c,), (n,) = summed, columns
    # The row letter is in the left operand only; further such letters are batch axes the right one is broadcast over.
    rows = [x for x in out if x in a and x not in b]
    if not rows or any(x not in out and x != c for x in a + b):
        return None
    return _product(node, a, b, out, rows[-1], n, c, 1.0, folder)


def _without_ellipsis(a: str, b: str, out: str, ranks: list[int]) -> tuple[str, str, str]:
    free = [x for x in _LETTERS if x not in a + b + out]
    count = (
        max(rank - len(t.replace("...", "")) for t, rank in zip((a, b), ranks, strict=True) if "..." in t)
        if ("..." in a + b)
        else 0
    )
    names = "".join(free[:count])
    extra_a, extra_b = (ranks[i] - len(t.replace("...", "")) for i, t in enumerate((a, b)))
    a = a.replace("...", names[count - extra_a :] if "..." in a else "")
    b = b.replace("...", names[count - extra_b :] if "..." in b else "")
    return a, b, out.replace("...", names)


def _product(
    node: gs.Node, a: str, b: str, out: str, m: str, n: str, c: str, alpha: float, folder: Folder
) -> Product | None:
    left, right = node.inputs[:2]
    batch = "".join(x for x in out if x not in (m, n))
    sizes: dict[str, int] = {}
    for letters, tensor in ((a, left), (b, right)):
        shape = folder.shape(tensor) or ()
        if len(letters) != len(shape):
            return None
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    canonical = batch + m + n
    perm = tuple(canonical.index(x) for x in out)
    return Product(node, left, right, a, b, batch, m, n, c, perm, tuple(sizes[x] for x in batch), alpha)


def in_place(product: Product) -> bool:
    """True when the result is the canonical [batch..., rows, columns] itself."""
    return product.perm == tuple(np.arange(len(product.perm)))
