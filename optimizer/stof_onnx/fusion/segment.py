"""Segments: consecutive operators of a block, what goes in and out, their hash, whether they may be fused at all."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np
import onnx

from stof_onnx.fusion.sequence import STANDARD, Block, Operator
from stof_onnx.fusion.tensors import FLOATS
from stof_onnx.graph.proto_graph import read_names, subgraphs

MOST_GEMMS = 2
_HASH_BYTES = 8


class Segment:
    """Operators `start` to `stop - 1` of `block`."""

    def __init__(self, block: Block, start: int, stop: int) -> None:
        if not 0 <= start < stop <= len(block):
            raise ValueError(f"no segment {start}..{stop} in a block of {len(block)} operators")
        self.block, self.start, self.stop = block, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"Segment({', '.join(map(repr, self.operators))})"

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.stop

    @property
    def operators(self) -> tuple[Operator, ...]:
        return self.block.operators[self.start : self.stop]

    @cached_property
    def made(self) -> tuple[str, ...]:
        """Tensors that its operators make."""
        return tuple(name for o in self.operators for name in o.node.output if name)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Tensors it reads and does not make, without inlined constants, in the order of first use."""
        made = set(self.made)
        read = (name for o in self.operators for name in read_names(o.node))
        return tuple(dict.fromkeys(name for name in read if name not in made and not self.inlined(name)))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Tensors it makes that something outside reads."""
        return tuple(name for name in self.made if self.block.read_outside(name, self.start, self.stop))

    @cached_property
    def constants(self) -> tuple[str, ...]:
        """Inlined constants, in the order of first use."""
        read = (name for o in self.operators for name in read_names(o.node))
        return tuple(dict.fromkeys(name for name in read if self.inlined(name)))

    @cached_property
    def gemms(self) -> int:
        """How many GEMMs it holds; those that share their input count as one."""
        return len({o.node.input[0] for o in self.operators if o.gemm})

    def inlined(self, name: str) -> bool:
        """Whether a constant is part of what the segment computes (numbers, shapes, axes) and not a weight."""
        value = self.block.tensors.value(name) if self.block.tensors.is_constant(name) else None
        return value is not None and (value.size <= 1 or value.dtype.kind in "iub")

    @cached_property
    def hash(self) -> str:
        """Of operators, attributes, shapes, types and wiring; equal layers hash alike, whatever their names."""
        digest = hashlib.blake2b(digest_size=_HASH_BYTES)
        names: dict[str, str] = {"": ""}
        tensors = self.block.tensors
        for name in self.inputs:
            names[name] = f"in{len(names)}"
            kind = "constant" if tensors.is_constant(name) else "input"
            digest.update(repr((kind, self._facts(name))).encode())
        for name in self.constants:
            value = tensors.value(name)
            assert value is not None
            names[name] = f"c:{value.dtype.str}:{value.shape}:{value.tobytes().hex()}"
        for i, operator in enumerate(self.operators):
            node = operator.node
            for j, name in enumerate(node.output):
                if name:
                    names[name] = f"t{i}.{j}"
            attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
            wiring = [names.get(n, n) for n in node.input], [names.get(n, "") for n in node.output]
            digest.update(repr((node.domain, node.op_type, attributes, wiring)).encode())
            digest.update(repr([self._facts(name) for name in node.output]).encode())
        digest.update(repr([names[name] for name in self.outputs]).encode())
        return digest.hexdigest()

    def _facts(self, name: str) -> object:
        """Type and sizes of a tensor; axes that shape inference has named itself count as not known."""
        tensors = self.block.tensors
        dims = tensors.shape(name)
        known = dims and tuple(None if isinstance(d, str) and d.startswith("unk__") else d for d in dims)
        return tensors.types.get(name), known, tensors.opt(name)

    def convex(self) -> bool:
        """Whether no path leaves the segment and comes back into it."""
        graph, inside = self.block.tensors, {o.index for o in self.operators}
        pending = [reader for name in self.outputs for reader in graph.readers[name] if reader not in inside]
        last, seen = max(inside), set(pending)
        while pending:
            node = graph.nodes[pending.pop()]
            for name in node.output:
                for reader in graph.readers[name] if name else ():
                    if reader in inside:
                        return False
                    if reader not in seen and reader < last:
                        seen.add(reader)
                        pending.append(reader)
        return True

    def _unread(self) -> str:
        """The type of an operator that no output depends on; empty where there is none."""
        needed = set(self.outputs)
        for operator in reversed(self.operators):
            if needed.isdisjoint(operator.node.output):
                return operator.op
            needed.update(read_names(operator.node))
        return ""

    def problem(self) -> str:
        """Why no kernel can stand for these operators; empty when one may."""
        for operator in self.operators:
            node = operator.node
            if node.domain not in STANDARD or any(True for _ in subgraphs(node)):
                return f"{operator.op} is not an operator that is fused"
            if operator.projection and not all(o.projection for o in self.operators):
                return "a part of it makes Q, K or V of an attention, which lowering packs into one GEMM"
            if any(self.block.tensors.types.get(name) not in FLOATS for name in node.output if name):
                return f"{operator.op} makes something else than fp16, bf16 or fp32"
        if self.gemms > MOST_GEMMS:
            return f"{self.gemms} GEMMs, at most {MOST_GEMMS} go into a segment"
        if not self.outputs:
            return "nothing reads what it makes"
        if dead := self._unread():
            return f"nothing reads what {dead} makes"
        if not self.convex():
            return "a path leaves the segment and comes back into it"
        return ""


def block_hash(block: Block) -> str:
    """The hash of all operators of a block: what plans know it by."""
    return Segment(block, 0, len(block)).hash


def attribute(node: onnx.NodeProto, name: str, default: float = 0) -> float:
    """A numeric attribute of a node."""
    for a in node.attribute:
        if a.name == name:
            return float(onnx.helper.get_attribute_value(a))
    return default


def is_scalar(value: np.ndarray | None) -> bool:
    """Whether a constant is one number."""
    return value is not None and value.size == 1
