"""Random input sets: sizes across the allowed ranges, ids inside their tables, key padding on either side."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stof_onnx.attention.types import AttentionMatch
from stof_onnx.mask.decode import decode_band
from stof_onnx.mask.encoded import EncodedMask
from stof_onnx.options import DimRange
from stof_onnx.verify.roles import InputRole, Role

_FREE_BATCH, _FREE_SIZE = 2, 64  # sizes of axes that nothing bounds
_BAND = 1024
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


@dataclass(frozen=True)
class Sample:
    """One input set and what is special about it."""

    what: str
    feeds: dict[str, np.ndarray]


class VisibleKeys:
    """How far padding may reach from either side without hiding all keys of a row of any of these masks."""

    def __init__(self, masks: Iterable[EncodedMask]) -> None:
        self._masks = list(dict.fromkeys(masks))
        self._limits: dict[int, tuple[int, int]] = {}

    @staticmethod
    def of(matches: Sequence[AttentionMatch]) -> VisibleKeys:
        """The static masks that are combined with run-time padding."""
        return VisibleKeys(m.mask for m in matches if m.mask is not None and m.kv_mask.tensor is not None)

    def limits(self, keys: int) -> tuple[int, int]:
        """(first, last): with `keys` keys every row sees one at or before `first`, and one at `last` or after."""
        if keys not in self._limits:
            found = [_visible(mask, keys) for mask in self._masks]
            first = max((low for low, _ in found), default=0)
            self._limits[keys] = (min(first, keys - 1), min((high for _, high in found), default=keys - 1))
        return self._limits[keys]


def _visible(mask: EncodedMask, keys: int) -> tuple[int, int]:
    """The limits of one mask cut to `keys` keys (and as many rows, where it is square)."""
    keys = min(keys, mask.s_kv)
    rows = keys if mask.s_q == mask.s_kv else mask.s_q
    first, last = 0, keys - 1
    for number in range(mask.n_masks):
        for q0 in range(0, rows, _BAND):
            allowed = decode_band(mask, q0, min(q0 + _BAND, rows), number)[:, :keys]
            allowed = allowed[allowed.any(axis=1)]
            if allowed.size:
                first = max(first, int(allowed.argmax(axis=1).max()))
                last = min(last, keys - 1 - int(allowed[:, ::-1].argmax(axis=1).max()))
    return first, last


def make_samples(
    roles: Sequence[InputRole],
    ranges: Mapping[str, tuple[DimRange | None, ...]],
    count: int,
    keep_rows: VisibleKeys | None,
    rng: np.random.Generator,
) -> list[Sample]:
    """`count` input sets, more where the model has padding: none, right, left and ragged, all keys of an entry hidden.

    Args:
        ranges: what each axis of each input may be.
        keep_rows: padding that leaves every row a key; None where rows may be emptied.
    """
    padded = any(r.role is Role.MASK and len(r.dims) <= 2 for r in roles)
    kinds = ["no padding"] * count
    if padded and keep_rows is None:
        kinds = ["no padding", "padded right", "padded left", "padded at random", "one entry all padding"]
    elif padded:
        kinds = ["no padding", "padded right", "padded left"]
    samples = []
    for number in range(max(count, len(kinds))):
        kind = kinds[number] if number < len(kinds) else kinds[number % len(kinds)]
        shapes = _shapes(roles, ranges, _Sizes(number, rng))
        feeds = {role.name: _fill(role, shapes[role.name], kind, keep_rows, rng) for role in roles}
        what = ", ".join(f"{name} {'x'.join(map(str, v.shape)) or 'scalar'}" for name, v in feeds.items())
        samples.append(Sample(f"{kind}: {what}" if padded else what, feeds))
    return samples


def _shapes(
    roles: Sequence[InputRole], ranges: Mapping[str, tuple[DimRange | None, ...]], sizes: _Sizes
) -> dict[str, tuple[int, ...]]:
    """The shape of every input; sums of sizes such as "past + sequence" come after the sizes they are made of."""
    axes = [
        (role.name, axis, dim, bounds[axis] if axis < len(bounds) else None)
        for role in roles
        for bounds in [ranges.get(role.name, ())]
        for axis, dim in enumerate(role.dims)
    ]
    found: dict[tuple[str, int], int] = {}
    for name, axis, dim, bound in sorted(axes, key=lambda a: isinstance(a[2], str) and not a[2].isidentifier()):
        found[name, axis] = sizes.of(dim, bound, axis)
    return {role.name: tuple(found[role.name, axis] for axis in range(len(role.dims))) for role in roles}


class _Sizes:
    """One choice of all dynamic sizes: the optimum first, then the largest, the smallest, and any between."""

    def __init__(self, number: int, rng: np.random.Generator) -> None:
        self.number = number
        self.rng = rng
        self.named: dict[str, int] = {}

    def of(self, dim: int | str | None, bound: DimRange | None, axis: int) -> int:
        if isinstance(dim, int) and dim > 0:
            return dim
        if isinstance(dim, str) and dim:
            if dim not in self.named:
                self.named[dim] = self._evaluate(dim) or self._pick(bound, axis)
            return self.named[dim]
        return self._pick(bound, axis)

    def _pick(self, bound: DimRange | None, axis: int) -> int:
        if bound is None:
            return _FREE_BATCH if axis == 0 else max(1, _FREE_SIZE - 13 * (self.number % 3))
        between = int(self.rng.integers(bound.min, bound.max + 1))
        choices = (bound.opt, between if bound.opt == bound.max else bound.max, bound.min, between)
        return choices[min(self.number, 3)]

    def _evaluate(self, text: str) -> int | None:
        """The value of a size such as "past_length + sequence_length" whose names are known; else None."""
        try:
            return self._value(ast.parse(text, mode="eval").body)
        except (SyntaxError, KeyError, ZeroDivisionError):
            return None

    def _value(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return self.named[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](self._value(node.left), self._value(node.right)))
        raise KeyError(ast.dump(node))


def _fill(
    role: InputRole, shape: tuple[int, ...], kind: str, keep_rows: VisibleKeys | None, rng: np.random.Generator
) -> np.ndarray:
    if role.role is Role.VALUES:
        return rng.standard_normal(shape).astype(role.dtype)
    if role.role is Role.IDS:
        return rng.integers(0, role.limit, shape).astype(role.dtype)
    if role.role is Role.POSITIONS:
        length = shape[-1] if shape else 1
        return np.broadcast_to(np.arange(length) % (role.limit or length), shape).astype(role.dtype)
    if len(shape) <= 2:
        return _padding(shape, kind, keep_rows, rng).astype(role.dtype)
    # A mask over queries and keys: a random one in which a query always sees the key of its own position.
    allowed = rng.random(shape) < 0.7
    rows, cols = shape[-2:]
    allowed[..., np.arange(rows), np.minimum(np.arange(rows), cols - 1)] = True
    if role.dtype.kind != "f" and role.dtype.name != "bfloat16":
        return allowed.astype(role.dtype)
    return np.where(allowed, 0.0, -1e4).astype(role.dtype)


def _padding(shape: tuple[int, ...], kind: str, keep_rows: VisibleKeys | None, rng: np.random.Generator) -> np.ndarray:
    """1 where a key may be attended, [batch, keys]; every entry keeps at least one key unless `kind` says otherwise."""
    out = np.ones(shape, np.int64)
    if out.ndim == 0 or out.size == 0 or kind == "no padding":
        return out
    entries = out.reshape(-1, shape[-1])
    keys = shape[-1]
    first, last = keep_rows.limits(keys) if keep_rows else (0, keys - 1)
    for entry in entries:
        if kind == "padded right" and first + 1 < keys:
            entry[int(rng.integers(first + 1, keys)) :] = 0
        elif kind == "padded left" and last > 0:
            entry[: int(rng.integers(1, last + 1))] = 0
        elif kind == "padded at random":
            entry[:] = rng.random(keys) < 0.7
            entry[int(rng.integers(keys))] = 1
    if kind == "one entry all padding":
        entries[int(rng.integers(len(entries)))] = 0
    return out
