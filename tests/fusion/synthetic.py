"""A timer that knows the truth, and a layer as exporters write it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from stof_onnx.fusion.piece_model import piece_key
from stof_onnx.fusion.search import Measurement, Region
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import Block, find_blocks

from tests.fusion.graphs import GraphBuilder, gelu_erf, tensors_of

_LAUNCH = 3.0
CONFIGS = tuple(f"config{i}" for i in range(8))


@dataclass
class Synthetic:
    """Times drawn from a seed, the same for the same segment in every process. Every request is counted.

    A region takes a launch, and what its operators take alone times a share of its template and factors of the segment
    and the configuration; a piece takes a launch and a share of its own. `share`: range of the templates' shares.
    """

    seed: int = 0
    share: tuple[float, float] = (0.5, 1.2)
    seconds: float = 0.01
    name: str = "synthetic"
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    interrupt_after: int = -1

    def configs(self, region: Region) -> tuple[str, ...]:
        return CONFIGS

    def fused(self, region: Region, config: str) -> Measurement:
        self._note(region.key, config)
        share = self._rng(region.instance.template).uniform(*self.share)
        factor = self._rng(region.key).uniform(1.0, 1.04)
        spread = 0.1 if config == CONFIGS[0] else 0.4
        factor *= 1.0 + spread * self._rng(region.key + config).random()
        return Measurement(_LAUNCH + share * factor * _alone(region.segment), self.seconds)

    def left(self, piece: Segment) -> Measurement:
        self._note(piece_key(piece), "")
        share = self._rng("TensorRT").uniform(0.8, 0.95) * self._rng(piece_key(piece)).uniform(1.0, 1.04)
        return Measurement(_LAUNCH + _alone(piece) * share, self.seconds)

    def _note(self, segment: str, config: str) -> None:
        self.asked[segment, config] += 1
        if sum(self.asked.values()) == self.interrupt_after:
            raise KeyboardInterrupt

    def _rng(self, key: str) -> random.Random:
        return random.Random(f"{self.seed}:{key}")


def _alone(segment: Segment) -> float:
    return sum(100.0 if o.gemm else 20.0 if "Norm" in o.op else 10.0 for o in segment.operators)


def layer_block(width: int = 32, layers: int = 1) -> Block:
    """Out-projection, residual, norm, GELU MLP, residual, norm: the operators of BERT between two attentions."""
    b = GraphBuilder(np.random.default_rng(0))
    x, attended = b.input("x", 64, width), b.input("attended", 64, width)
    for _ in range(layers):
        s = b.op("Add", b.op("Add", b.op("MatMul", attended, b.weight(width, width)), b.vector(width)), x)
        middle = b.op("LayerNormalization", s, b.vector(width), b.vector(width), axis=-1)
        inner = b.op("Add", b.op("MatMul", middle, b.weight(width, 4 * width)), b.vector(4 * width))
        down = b.op("MatMul", gelu_erf(b, inner, 1), b.weight(4 * width, width))
        s = b.op("Add", b.op("Add", down, b.vector(width)), middle)
        x = attended = b.op("LayerNormalization", s, b.vector(width), b.vector(width), axis=-1)
    model = b.model(x)
    (block,) = find_blocks(tensors_of(model, {"x": (64, width), "attended": (64, width)}))
    return block
