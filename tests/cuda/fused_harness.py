"""One fused GEMM region on the GPU: fresh inputs, a float64 reference, the same computation op by op in its own type.

Rows of every matrix are followed by NaN where strides leave room, and matrices by NaN rows; outputs start poisoned and
lie between guard zones. Every case runs twice and must repeat bit for bit.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from stof_onnx.errors import StofError
from stof_onnx.kernels.fused_capi import AUTO_CONFIG, CUBLASLT_CONFIG, Activation, FusedLibrary, FusedParams, Template

from tests.cuda.harness import CAPI_DTYPES, DTYPES, GUARD, POISON, ROUNDING

T = TypeVar("T")
GEMM_TEMPLATES = (Template.GEMM_EPILOGUE, Template.GATED_MLP)  # gemm_norm_harness.py has the third


@dataclass(frozen=True)
class FusedCase:
    """What to run. `pad` elements follow each row of every matrix; `residual` is none, other or in_place.

    `rotated` columns, in heads of `head_dim`, are rotated by one of `positions` angles for each row.
    """

    template: Template = Template.GEMM_EPILOGUE
    config: int = AUTO_CONFIG
    m: int = 130
    n: int = 136
    k: int = 72
    dtype: str = "f16"
    activation: Activation = Activation.NONE
    bias: bool = True
    residual: str = "none"
    pad: int = 0
    rotated: int = 0
    head_dim: int = 0
    positions: int = 0

    def __str__(self) -> str:
        parts = [self.template.name.lower(), f"{self.config}", f"{self.m}x{self.n}x{self.k}", self.dtype]
        parts += [self.activation.name.lower(), f"bias{int(self.bias)}", self.residual, f"pad{self.pad}"]
        if self.rotated:
            parts.append(f"rotated{self.rotated}x{self.head_dim}x{self.positions}")
        return "-".join(parts)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    functional = torch.nn.functional
    return {
        Activation.NONE: lambda x: x,
        Activation.RELU: torch.relu,
        Activation.GELU_ERF: functional.gelu,
        Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
        Activation.SILU: functional.silu,
    }[activation](x)


class FusedInputs:
    """Fresh tensors of a case."""

    def __init__(self, case: FusedCase, seed: int, device: str = "cuda") -> None:
        self.case, self.device, self.dtype = case, device, DTYPES[case.dtype]
        self.generator = torch.Generator(device=device).manual_seed(seed)
        gated = case.template == Template.GATED_MLP
        self.a = self._matrix(case.m, case.k)
        self.b = self._matrix(case.k, case.n, case.k**-0.5 * 2)
        self.b2 = self._matrix(case.k, case.n, case.k**-0.5) if gated else None
        self.bias = self._randn(case.n) if case.bias else None
        self.bias2 = self._randn(case.n) if case.bias and gated else None
        self.residual = self._matrix(case.m, case.n) if case.residual != "none" else None
        self.turns = self._turns() if case.rotated else None

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def _matrix(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        storage = torch.full((rows + 3, columns + self.case.pad), torch.nan, dtype=self.dtype, device=self.device)
        view = storage[:rows, :columns]
        view.copy_(self._randn(rows, columns) * scale)
        return view

    def _turns(self) -> torch.Tensor:
        """float32 [positions, head_dim / 2, 2]: cos and sin of random angles, NaN behind the last."""
        pairs = self.case.positions, self.case.head_dim // 2
        angles = torch.rand(*pairs, generator=self.generator, device=self.device) * 2 * torch.pi
        storage = torch.full((pairs[0] + 1, pairs[1], 2), torch.nan, device=self.device)
        storage[:-1] = torch.stack([angles.cos(), angles.sin()], -1)
        return storage[:-1]

    def output(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A poisoned output, and the whole buffer with its guard zones."""
        case = self.case
        word, pattern = POISON[self.dtype]
        width = case.n + case.pad
        buffer = torch.full((case.m * width + 2 * GUARD,), pattern, dtype=word, device=self.device).view(self.dtype)
        return buffer[GUARD : GUARD + case.m * width].view(case.m, width)[:, : case.n], buffer

    def params(self, out: torch.Tensor) -> FusedParams:
        case = self.case
        p = FusedParams(
            template_id=case.template, config=case.config, dtype=CAPI_DTYPES[case.dtype], activation=case.activation,
            m=case.m, n=case.n, k=case.k, a=self.a.data_ptr(), b=self.b.data_ptr(), out=out.data_ptr(),
            stride_a=self.a.stride(0), stride_b=self.b.stride(0), stride_out=out.stride(0),
        )  # fmt: skip
        if self.b2 is not None:
            p.b2, p.stride_b2 = self.b2.data_ptr(), self.b2.stride(0)
        if self.bias is not None:
            p.bias = self.bias.data_ptr()
        if self.bias2 is not None:
            p.bias2 = self.bias2.data_ptr()
        if self.residual is not None:
            place = out if case.residual == "in_place" else self.residual
            p.residual, p.stride_residual = place.data_ptr(), place.stride(0)
        if self.turns is not None:
            p.rotation, p.rotated_columns = self.turns.data_ptr(), case.rotated
            p.head_dim, p.positions = case.head_dim, case.positions
        return p

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """The region op by op in `dtype`."""

        def linear(b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            product = self.a.to(dtype) @ b.to(dtype)
            return product if bias is None else product + bias.to(dtype)

        out = activate(linear(self.b, self.bias), self.case.activation)
        if self.b2 is not None:
            out = out * linear(self.b2, self.bias2)
        if self.turns is not None:
            out = torch.cat([self._rotated(out[:, : self.case.rotated], dtype), out[:, self.case.rotated :]], 1)
        return out if self.residual is None else out + self.residual.to(dtype)

    def _rotated(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert self.turns is not None
        case = self.case
        turns = self.turns.to(dtype)[torch.arange(case.m, device=self.device) % case.positions, None]
        cos, sin = turns[..., 0], turns[..., 1]
        first, second = x.reshape(case.m, -1, case.head_dim // 2, 2).unbind(-1)
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)


def check_written(case: FusedCase, buffer: torch.Tensor) -> None:
    """Every element of the output in `buffer` was written, and nothing beside it."""
    word, pattern = POISON[buffer.dtype]
    words = buffer.view(word)
    assert bool((words[:GUARD] == pattern).all()) and bool((words[-GUARD:] == pattern).all()), (
        "wrote outside the output"
    )
    rows = words[GUARD:-GUARD].view(case.m, case.n + case.pad)
    assert bool((rows[:, case.n :] == pattern).all()), "wrote behind the rows of the output"
    assert not bool((rows[:, : case.n] == pattern).any()), "left elements unwritten"


def launch(library: FusedLibrary, p: FusedParams) -> None:
    """Runs `p` to its end."""
    reason = library.unsupported(p)
    assert reason is None, f"unsupported: {reason}"
    workspace = torch.full((library.workspace_bytes(p),), 0xA5, dtype=torch.uint8, device="cuda")
    p.workspace, p.workspace_bytes = workspace.data_ptr(), workspace.numel()
    library.launch(p, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def run(library: FusedLibrary, inputs: FusedInputs) -> torch.Tensor:
    """Runs the case into a poisoned output; checks guard zones and that nothing but the output was written."""
    out, buffer = inputs.output()
    if inputs.case.residual == "in_place":
        out.copy_(inputs.residual)
    launch(library, inputs.params(out))
    check_written(inputs.case, buffer)
    return out


def seed_of(case: FusedCase, base_seed: int) -> int:
    return (zlib.crc32(str(case).encode()) ^ base_seed) & 0x7FFFFFFF


def compare(
    where: str, dtype: str, out: torch.Tensor, again: torch.Tensor, reference: torch.Tensor, framework: torch.Tensor
) -> tuple[float, float]:
    """Two runs' outputs against each other and float64. Returns (our error, the framework's error): the largest."""
    word = POISON[out.dtype][0]
    assert torch.equal(out.contiguous().view(word), again.contiguous().view(word)), f"{where}: two runs differ"
    difference, difference_framework = out.double() - reference, framework.double() - reference
    ours, theirs = difference.abs().max().item(), difference_framework.abs().max().item()
    size = reference.abs().max().item()
    bound = 2 * theirs + ROUNDING[dtype] * size
    assert ours <= bound, (  # NaN fails too
        f"{where}: error {ours:.3g} > {bound:.3g} (the framework's own: {theirs:.3g}, values up to {size:.3g})"
    )
    norm, norm_framework = difference.norm().item(), difference_framework.norm().item()
    # Of a handful of numbers the norm is a matter of single roundings, which the bound above covers.
    assert out.numel() < 64 or norm <= 1.1 * norm_framework + 1e-6 * reference.norm().item(), (
        f"{where}: error norm {norm:.3g}, the framework's {norm_framework:.3g}"
    )
    return ours, theirs


def twice(where: str, run_once: Callable[[], T]) -> tuple[T, T]:
    """The results of two runs; what goes wrong is told with the case and seed."""
    try:
        return run_once(), run_once()
    except (AssertionError, StofError) as error:
        raise AssertionError(f"{where}: {error}") from error


def check(library: FusedLibrary, case: FusedCase, base_seed: int) -> tuple[float, float]:
    """Runs one case and compares. Returns (our error, the framework's error): largest, against float64.

    Raises:
        AssertionError: with the case and the seed in the message.
    """
    where = f"{case} (base seed {base_seed})"
    inputs = FusedInputs(case, seed_of(case, base_seed))
    out, again = twice(where, lambda: run(library, inputs))
    return compare(where, case.dtype, out, again, inputs.reference(torch.float64), inputs.reference(inputs.dtype))


def cases(library: FusedLibrary) -> Iterator[FusedCase]:
    """Every variant with each activation and dtype, on sizes with tails; and what strides, bias and residual may be."""
    for template in GEMM_TEMPLATES:
        for config in range(len(library.configs(template))):
            base = FusedCase(template, config)
            for activation in Activation:
                for dtype in ("f16", "bf16"):
                    yield dataclasses.replace(base, activation=activation, dtype=dtype, m=300, n=328, k=200)
            # Many tiles a block, a single row, one step, long sums.
            for m, n, k in ((5000, 1544, 72), (1, 8, 8), (257, 512, 64), (128, 136, 3000), (2049, 256, 776)):
                yield dataclasses.replace(base, m=m, n=n, k=k, bias=False, pad=8)
            if template == Template.GEMM_EPILOGUE:
                for residual in ("other", "in_place"):
                    for m, n, k in ((4100, 2056, 200), (77, 264, 64), (3000, 768, 768)):
                        yield dataclasses.replace(base, m=m, n=n, k=k, residual=residual, pad=24, dtype="bf16")
                    gelu = Activation.GELU_ERF
                    yield dataclasses.replace(base, m=1000, n=1000, k=1000, residual=residual, activation=gelu)
                # Q and K heads ahead of V: of sizes that tiles do not hold whole, all columns, positions that wrap.
                for n, rotated, head_dim, positions in (
                    (2304, 1536, 64, 512), (3072, 2560, 128, 77), (1000, 720, 80, 4096), (264, 264, 88, 1),
                    (648, 16, 8, 300),
                ):  # fmt: skip
                    turned = dataclasses.replace(base, rotated=rotated, head_dim=head_dim, positions=positions)
                    yield dataclasses.replace(turned, m=1500, n=n, k=264, dtype="bf16", pad=8)
                    yield dataclasses.replace(turned, m=77, n=n, k=520, bias=False)
    for template in GEMM_TEMPLATES:
        for m in (1, 128, 4096):
            yield FusedCase(template, AUTO_CONFIG, m, 768, 768)


def cublaslt_cases() -> Iterator[FusedCase]:
    """What cuBLASLt's epilogues can, on sizes with tails."""
    base = FusedCase(config=CUBLASLT_CONFIG)
    for dtype in ("f16", "bf16"):
        for m, n, k in ((300, 328, 200), (1, 8, 8), (128, 768, 3072), (5000, 1544, 72), (4096, 2304, 768)):
            sized = dataclasses.replace(base, dtype=dtype, m=m, n=n, k=k)
            for activation in (Activation.NONE, Activation.RELU, Activation.GELU_TANH):
                for bias in (True, False):
                    yield dataclasses.replace(sized, activation=activation, bias=bias, pad=8 * bias)
            for residual in ("other", "in_place"):
                yield dataclasses.replace(sized, residual=residual, pad=24)


def fuzz(library: FusedLibrary, count: int, seed: int) -> Iterator[FusedCase]:
    """Random combinations."""
    rng = random.Random(seed)
    for _ in range(count):
        template = rng.choice(GEMM_TEMPLATES)
        gated = template == Template.GATED_MLP
        case = FusedCase(
            template, rng.randrange(-1, len(library.configs(template))),
            m=rng.randint(1, 3000), n=8 * rng.randint(1, 300), k=8 * rng.randint(1, 200),
            dtype=rng.choice(("f16", "bf16")), activation=rng.choice(list(Activation)), bias=rng.random() < 0.7,
            residual="none" if gated else rng.choice(("none", "other", "in_place")), pad=8 * rng.randint(0, 3),
        )  # fmt: skip
        yield _turned(case, rng) if not gated and rng.random() < 0.3 else case


def _turned(case: FusedCase, rng: random.Random) -> FusedCase:
    """The case with a rotation in place of an activation and a residual."""
    head_dim = 8 * rng.randint(1, min(32, case.n // 8))
    rotated = head_dim * rng.randint(1, case.n // head_dim)
    turned = {"rotated": rotated, "head_dim": head_dim, "positions": rng.randint(1, 2 * case.m)}
    return dataclasses.replace(case, activation=Activation.NONE, residual="none", **turned)
