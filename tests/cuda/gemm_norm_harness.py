"""One GEMM with a norm behind it on the GPU: as fused_harness.py, with the sum as a second output."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from stof_onnx.kernels.fused_capi import FusedLibrary, FusedParams, Norm, Template

from tests.cuda.fused_harness import FusedCase, FusedInputs, check_written, compare, launch, seed_of, twice

EPSILON = 1e-5
ROWS = (1, 7, 127, 129, 1000)


@dataclass(frozen=True)
class NormCase(FusedCase):
    """What to run. `residual` in_place lies where the sum goes, or the output where no sum is wanted.

    `offset` is added to the residual: rows whose mean is far larger than their deviation.
    """

    template: Template = Template.GEMM_NORM
    norm: Norm = Norm.LAYER
    scale: bool = True
    shift: bool = True
    keep_sum: bool = False
    offset: float = 0.0

    def __str__(self) -> str:
        parts = [super().__str__(), self.norm.name.lower(), f"scale{self.scale:d}", f"shift{self.shift:d}"]
        return "-".join([*parts, f"sum{self.keep_sum:d}", f"offset{self.offset:g}"])


class NormInputs(FusedInputs):
    """Fresh tensors of a case."""

    case: NormCase

    def __init__(self, case: NormCase, seed: int, device: str = "cuda") -> None:
        super().__init__(case, seed, device)
        self.scale = self._randn(case.n) + 1 if case.scale else None
        self.shift = self._randn(case.n) if case.shift else None
        if self.residual is not None:
            self.residual += case.offset

    def norm_params(self, out: torch.Tensor, total: torch.Tensor | None) -> FusedParams:
        p = self.params(out)
        p.norm, p.epsilon = int(self.case.norm), EPSILON
        p.scale = None if self.scale is None else self.scale.data_ptr()
        p.shift = None if self.shift is None else self.shift.data_ptr()
        if total is not None:
            p.sum, p.stride_sum = total.data_ptr(), total.stride(0)
            if self.case.residual == "in_place":
                p.residual, p.stride_residual = p.sum, p.stride_sum
        return p

    def norm_reference(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised rows and the sum, op by op in `dtype`."""
        total = self.reference(dtype)
        scale, shift = (None if v is None else v.to(dtype) for v in (self.scale, self.shift))
        width, functional = (self.case.n,), torch.nn.functional
        if self.case.norm == Norm.LAYER:
            return functional.layer_norm(total, width, scale, shift, EPSILON), total
        out = functional.rms_norm(total, width, scale, EPSILON)
        return out if shift is None else out + shift, total


def run(library: FusedLibrary, inputs: NormInputs) -> list[torch.Tensor]:
    """Runs the case into poisoned outputs (the rows, and the sum where it is wanted) and checks what was written."""
    case = inputs.case
    made = [inputs.output() for _ in range(1 + case.keep_sum)]
    if case.residual == "in_place":
        made[-1][0].copy_(inputs.residual)
    launch(library, inputs.norm_params(made[0][0], made[1][0] if case.keep_sum else None))
    for _, buffer in made:
        check_written(case, buffer)
    return [out for out, _ in made]


def check(library: FusedLibrary, case: NormCase, base_seed: int) -> None:
    """Runs one case twice and compares.

    Raises:
        AssertionError: with the case and the seed in the message.
    """
    where = f"{case} (base seed {base_seed})"
    inputs = NormInputs(case, seed_of(case, base_seed))
    outputs, repeated = twice(where, lambda: run(library, inputs))
    references = zip(inputs.norm_reference(torch.float64), inputs.norm_reference(inputs.dtype), strict=True)
    for out, again, (reference, framework) in zip(outputs, repeated, references, strict=False):
        compare(where, case.dtype, out, again, reference, framework)


def widths(library: FusedLibrary, index: int) -> list[int]:
    """Widths that clusters of all sizes take with this variant: whole blocks, and a last one of 8 columns."""
    config = library.configs(Template.GEMM_NORM)[index]
    return [
        config.tile_n * (blocks - 1) + rest for blocks in range(1, config.cluster_n + 1) for rest in (8, config.tile_n)
    ]


def cases(library: FusedLibrary) -> Iterator[NormCase]:
    """Every variant on any number of blocks, ragged rows, both norms and types; vectors, residual and sum may miss."""
    for config in range(len(library.configs(Template.GEMM_NORM))):
        base = NormCase(config=config)
        for i, n in enumerate(widths(library, config)):
            dtype, norm = ("f16", "bf16")[i // 2 % 2], (Norm.LAYER, Norm.RMS)[i // 4 % 2]
            yield dataclasses.replace(base, m=ROWS[i % 5], n=n, k=200, dtype=dtype, norm=norm, residual="other")
        for m in ROWS:
            for dtype in ("f16", "bf16"):
                yield dataclasses.replace(base, m=m, n=768, k=768, dtype=dtype, residual="other", keep_sum=m % 2 == 0)
        # Many tiles a block, one step, long sums, no vectors.
        for m, n, k in ((20000, 768, 72), (9000, 1024, 8), (257, 512, 3000)):
            for norm in Norm:
                yield dataclasses.replace(base, m=m, n=n, k=k, norm=norm, bias=False, scale=False, shift=False, pad=8)
        for residual in ("none", "other", "in_place"):
            for keep_sum in (False, True):
                yield dataclasses.replace(base, m=5000, n=768, k=264, residual=residual, keep_sum=keep_sum, pad=24)
        yield dataclasses.replace(base, m=300, n=768, k=64, residual="other", offset=30.0, keep_sum=True)
    for m in (1, 128, 4096):
        yield NormCase(m=m, n=768, k=768)


def fuzz(library: FusedLibrary, count: int, seed: int) -> Iterator[NormCase]:
    """Random combinations."""
    rng, configs = random.Random(seed), library.configs(Template.GEMM_NORM)
    for _ in range(count):
        config = rng.randrange(-1, len(configs))
        longest = (configs[config] if config >= 0 else max(configs, key=lambda c: c.tile_n)).tile_n
        yield NormCase(
            config=config, m=rng.randint(1, 6000), n=8 * rng.randint(1, longest), k=8 * rng.randint(1, 150),
            dtype=rng.choice(("f16", "bf16")), norm=rng.choice(list(Norm)), bias=rng.random() < 0.7,
            scale=rng.random() < 0.8, shift=rng.random() < 0.6, keep_sum=rng.random() < 0.5,
            residual=rng.choice(("none", "other", "in_place")), pad=8 * rng.randint(0, 3),
        )  # fmt: skip
