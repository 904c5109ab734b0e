"""Does one encoding at the largest sequence length serve every shorter one?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from stof_onnx.errors import StofError
from stof_onnx.mask.decode import decode
from stof_onnx.mask.encode import Bools, encode
from stof_onnx.mask.encoded import EncodedMask
from stof_onnx.mask.retile import leading_submatrix


@dataclass(frozen=True)
class PrefixBreak:
    """The first size at which a mask is not the leading submatrix of the largest one.

    Attributes:
        s_q, s_kv: that size.
        index: [b, h, q, k] of the first element that differs.
        allowed: what the mask of that size says there; the largest one says the opposite.
    """

    s_q: int
    s_kv: int
    index: tuple[int, int, int, int]
    allowed: bool

    def __str__(self) -> str:
        _, _, q, k = self.index
        here, there = ("allowed", "forbidden") if self.allowed else ("forbidden", "allowed")
        return f"at {self.s_q} x {self.s_kv} key {k} is {here} for query {q}, at the largest size it is {there}"


def first_prefix_break(
    largest: EncodedMask,
    mask_at: Callable[[int, int], EncodedMask | Bools],
    sizes: Iterable[tuple[int, int]],
) -> PrefixBreak | None:
    """Checks every given size; None proves the property for exactly those sizes.

    Args:
        largest: the mask at the largest size.
        mask_at: (s_q, s_kv) to the mask of that size: encoded, or bool [s_q, s_kv] or [B or 1, H or 1, s_q, s_kv].
        sizes: the (s_q, s_kv) that can occur; see `square_sizes`.

    Raises:
        StofError: `mask_at` returns another size than asked for, or a size is larger than `largest`.
    """
    for s_q, s_kv in sizes:
        found = mask_at(s_q, s_kv)
        shape = (found.s_q, found.s_kv) if isinstance(found, EncodedMask) else np.shape(found)[-2:]
        if shape != (s_q, s_kv):
            raise StofError(
                f"the mask for {s_q} x {s_kv} came as {' x '.join(map(str, shape))}",
                "mask",
                "Return the size asked for",
            )
        cut = leading_submatrix(largest, s_q, s_kv)
        if not isinstance(found, EncodedMask):
            found = encode(found, largest.tile_m, largest.tile_n)
        if found != cut:
            return _describe(found, cut)
    return None


def square_sizes(largest: int, smallest: int = 1, step: int = 1) -> Iterable[tuple[int, int]]:
    """The sizes (S, S) below the largest one, large ones first: a mask that breaks often does so right there."""
    return ((s, s) for s in range(largest - 1, smallest - 1, -step))


def _describe(found: EncodedMask, cut: EncodedMask) -> PrefixBreak | None:
    here = decode(found)
    there = decode(cut)
    differs = np.argwhere(here != there)
    if not len(differs):  # the same elements in other tiles
        return None
    b, h, q, k = (int(i) for i in differs[0])
    value = here[min(b, here.shape[0] - 1), min(h, here.shape[1] - 1), q, k]
    return PrefixBreak(found.s_q, found.s_kv, (b, h, q, k), bool(value))
