"""What a recogniser says of a segment: an instance of a template, or why it is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Template = Literal["gemm_epilogue", "gated_mlp", "gemm_norm", "gemm_pair", "projections", "norm", "chain"]
# Those whose kernels are in the plugin library; of the others they are compiled ahead of time.
GEMM_TEMPLATES = ("gemm_epilogue", "gated_mlp", "gemm_norm", "projections")

_GEMMS = {"gemm_epilogue": 1, "gated_mlp": 2, "gemm_norm": 1, "gemm_pair": 2, "projections": 3}


@dataclass(frozen=True)
class NoMatch:
    """No template computes this segment; `reason` says what is in the way."""

    reason: str


@dataclass(frozen=True)
class Instance:
    """A template with all that decides what it computes.

    Attributes:
        template: its name.
        inputs: tensors in the order that the template's node takes them.
        outputs: tensors in the order that the template's node makes them.
        attributes: of the node (contract: docs/architecture.md), without the configuration.
        dtype: of the model's tensors: "fp32", "fp16" or "bf16".
        rows: product of the leading axes at the sizes to tune for; 0 where they are not known.
        width: last axis of the first output.
        depth: last axis of x (K of GEMMs; the width of everything else).
        rank: of x and of every output.
        transposed: for each weight, in the order of the inputs, whether it is stored [N, K]; lowering turns it. (One
            tensor may be two weights, and only one of them turned.)
        vectors: inputs that are constants along the last axis, where the template does not say.
    """

    template: Template
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int | float | str]
    dtype: str
    rows: int
    width: int
    depth: int
    rank: int
    transposed: tuple[bool, ...] = ()
    vectors: tuple[str, ...] = ()

    @property
    def worth_it(self) -> bool:
        """Whether there is anything to merge: a GEMM by itself is what TensorRT has already."""
        return self.template != "gemm_epilogue" or any(v not in (0, "none") for v in self.attributes.values())

    @property
    def gemms(self) -> int:
        """Weights it multiplies by."""
        return _GEMMS.get(self.template, 0)

    @property
    def activation(self) -> str:
        """Of a GEMM."""
        return str(self.attributes.get("activation", "none"))

    @property
    def kernel(self) -> str:
        """The template of the plugin node that it becomes, for GEMMs: packed projections are one with a bias."""
        return "gemm_epilogue" if self.template == "projections" else self.template
