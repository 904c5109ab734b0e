"""How Q, K, V and O lie in memory, as function bodies see it."""

from __future__ import annotations

import enum

from stof_onnx.attention.functions.builder import FunctionBuilder
from stof_onnx.attention.types import Layout


class Form(str, enum.Enum):
    """A layout with its rank: bhsd [B, H, S, D], bshd [B, S, H, D], bsh [B, S, H*D]."""

    BHSD = "bhsd"
    BSHD = "bshd"
    BSH = "bsh"

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Form:
        """The form of an input with that layout and rank.

        Raises:
            ValueError: BHSD of rank 3, or a rank that is neither 3 nor 4.
        """
        if layout is Layout.BHSD and rank == 4:
            return cls.BHSD
        if layout is Layout.BSHD and rank in (3, 4):
            return cls.BSHD if rank == 4 else cls.BSH
        raise ValueError(f"no tensor of layout {layout.value} has rank {rank}")

    @property
    def seq_axis(self) -> int:
        return 2 if self is Form.BHSD else 1


def to_bhsd(b: FunctionBuilder, tensor: str, form: Form, heads: int) -> str:
    """`tensor` as [B, H, S, D]."""
    if form is Form.BSH:
        tensor = b.op("Reshape", tensor, b.ints(0, 0, heads, -1))
    return tensor if form is Form.BHSD else b.op("Transpose", tensor, perm=[0, 2, 1, 3])


def to_bhds(b: FunctionBuilder, tensor: str, form: Form, heads: int) -> str:
    """`tensor` as [B, H, D, S]."""
    if form is Form.BSH:
        tensor = b.op("Reshape", tensor, b.ints(0, 0, heads, -1))
    return b.op("Transpose", tensor, perm=[0, 1, 3, 2] if form is Form.BHSD else [0, 2, 3, 1])
