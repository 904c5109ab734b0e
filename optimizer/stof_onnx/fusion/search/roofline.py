"""A timer for machines without a GPU: estimates, marked as such in the plan.

Regions: the estimates of their kernels (kernels/gemm.py, kernels/triton_rows). Pieces: each GEMM at the device's matrix
rate, with bias and residual in its epilogue; everything else in passes over memory, one for each stretch of elementwise
operators and norms that is connected. That is how TensorRT 8.6 was seen to run a layer: its GEMMs, and 200 us beside
their 501 us at hidden size 768 and 32768 rows. Reading a residual comes on top of the GEMM in both: epilogues hide none
of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from stof_onnx.fusion.pairs import pair_of
from stof_onnx.fusion.row_programs import row_program
from stof_onnx.fusion.search.timer import Measurement, Region
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates import GEMM_TEMPLATES
from stof_onnx.kernels import gemm
from stof_onnx.kernels.gemm_pair import DTYPES
from stof_onnx.kernels.triton_rows import Program, estimate_us, parse_config, ranked

_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
_MOVES = frozenset({"Reshape", "Identity", "Cast", "Squeeze", "Unsqueeze"})
_EPILOGUE = frozenset({"Add"})


@dataclass(frozen=True)
class Roofline:
    """Estimates for one device and precision ("fp16", "bf16" or "fp32")."""

    precision: str = "fp16"
    device: gemm.GemmDevice = gemm.H200
    arch: int = 90

    @property
    def name(self) -> str:
        return f"roofline sm_{self.arch} {self.precision}"

    def configs(self, region: Region) -> Sequence[str]:
        instance = region.instance
        if not instance.rows:
            return ()
        if instance.template in GEMM_TEMPLATES:
            if self.arch != 90 or self.precision == "fp32":
                return ()
            sizes = instance.rows, instance.width, instance.depth
            return gemm.ranked(instance.kernel, *sizes, self.device, instance.activation)
        if instance.template == "gemm_pair" and self.precision not in DTYPES:
            return ()
        return [config.name for config in ranked(program_of(region, self.precision), instance.rows, self.device)]

    def fused(self, region: Region, config: str) -> Measurement:
        instance = region.instance
        if instance.template in GEMM_TEMPLATES:
            sizes = instance.rows, instance.width, instance.depth
            product_us = gemm.estimate_us(instance.kernel, config, *sizes, self.device, instance.activation)
            residual = instance.rows * instance.width if instance.attributes.get("has_residual") else 0
            return Measurement(product_us + self._read(residual))
        program = program_of(region, self.precision)
        return Measurement(estimate_us(program, parse_config(program, config), instance.rows, self.device))

    def left(self, piece: Segment) -> Measurement:
        total, stretch = 0.0, list[str]()
        in_epilogue = False
        for operator in piece.operators:
            if operator.gemm:
                total += self._passes(piece, stretch) + self._gemm(piece, operator.index)
                stretch, in_epilogue = [], True
            elif operator.op not in _MOVES:
                in_epilogue = in_epilogue and operator.op in _EPILOGUE
                if in_epilogue:
                    total += self._read(self._residual(piece, operator.index))
                else:
                    stretch += [*operator.node.input, *operator.node.output]
        return Measurement(total + self._passes(piece, stretch))

    def _gemm(self, piece: Segment, index: int) -> float:
        tensors, node = piece.block.tensors, piece.block.tensors.nodes[index]
        x, y = tensors.opt(node.input[0]), tensors.opt(node.output[0])
        if x is None or y is None:
            return 0.0
        rows = 1
        for size in y[:-1]:
            rows *= size
        moved = _BYTES[self.precision] * (rows * (x[-1] + y[-1]) + x[-1] * y[-1])
        busy = max(2.0 * rows * x[-1] * y[-1] / self.device.flops, moved / self.device.bandwidth)
        return self.device.launch_us + busy * 1e6

    def _residual(self, piece: Segment, index: int) -> int:
        """Elements that a sum reads beside the product and its bias."""
        node, tensors = piece.block.tensors.nodes[index], piece.block.tensors
        shapes = [tensors.opt(name) or () for name in (*node.output, *node.input)]
        return prod(shapes[0]) if all(shape == shapes[0] for shape in shapes) else 0

    def _read(self, elements: int) -> float:
        return 1e6 * _BYTES[self.precision] * elements / self.device.bandwidth

    def _passes(self, piece: Segment, names: list[str]) -> float:
        """One pass over what goes in and out of a stretch of operators."""
        if not names:
            return 0.0
        tensors, made = piece.block.tensors, set(piece.made)
        outputs = set(piece.outputs)
        moved = 0
        for name in dict.fromkeys(names):
            shape = tensors.opt(name)
            if shape is None or (name in made and name not in outputs and names.count(name) > 1):
                continue
            size = _BYTES[self.precision]
            for axis in shape:
                size *= axis
            moved += size
        return self.device.launch_us + moved / self.device.bandwidth * 1e6


def program_of(region: Region, precision: str) -> Program:
    """What is compiled ahead for a region, for engines of this precision.

    Raises:
        StofError: no kernel computes it in this precision.
    """
    instance, segment = region.instance, region.segment
    dtype = precision if instance.dtype == "fp32" else instance.dtype
    if instance.template == "gemm_pair":
        return pair_of(instance.attributes, instance.depth, instance.width, dtype)
    nodes = [operator.node for operator in segment.operators]
    value = segment.block.tensors.value
    return row_program(nodes, instance.inputs, instance.vectors, instance.outputs, instance.width, dtype, value)
