"""The exported architectures in torch.compile with FlexAttention: same sizes, mask and machine, weights at random.

    python -m benchmarks.compile_models FOLDER/gpt2-causal-16x2048x2.json ... [--mode max-autotune-no-cudagraphs]

The peers of benchmarks.real_models: BERT, GPT-2, LLaMA, T5's encoder and ViT as transformers defines them, from tokens
(or pixels) to the last hidden state, fp16, packed QKV, T5's relative bias and RoPE's angles from tables that are
computed beforehand; ViT, which masks nothing, takes torch's scaled_dot_product_attention. Timed by CUDA-graph replay.
BigBird is tried with FlexAttention's blocks of 128 and of 64. A JSON line a model and tile: model, mask, B, S, layers,
mode, tile, compile_ms, torch. Needs torch and numpy, nothing of stof_onnx.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from stof_models.info import ExportInfo, SiteInfo
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.compile_peer import joined, milliseconds

DEVICE, DTYPE = "cuda", torch.half
_ROPE_BASE, _PATCH = 10000.0, 2
_TILE = 128  # FlexAttention's own block size
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class Style:
    """What sets an architecture apart. `widening`: of the feed-forward layers; `source`: what the inputs are."""

    rms: bool = False
    pre_norm: bool = True
    bias: bool = True
    activation: str = "gelu"
    gated: bool = False
    widening: int = 4
    rope: bool = False
    relative: bool = False
    source: str = "tokens"
    positions: bool = False  # an embedding of them
    scaled: bool = True


STYLES = {
    "bert": Style(pre_norm=False, positions=True),
    "gpt2": Style(activation="gelu_tanh", positions=True),
    "llama": Style(rms=True, bias=False, activation="silu", gated=True, widening=3, rope=True),
    "t5-encoder": Style(rms=True, bias=False, activation="relu", relative=True, scaled=False),
    "vit": Style(source="pixels", positions=True),
}


class Layer(nn.Module):
    """One layer; `kv_heads` may be fewer than `heads`."""

    def __init__(self, style: Style, hidden: int, site: SiteInfo) -> None:
        super().__init__()
        self.style, self.heads, self.kv_heads, self.dim = style, site.heads, site.kv_heads or site.heads, site.head_dim
        inner, packed = style.widening * hidden, (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = nn.Linear(hidden, packed, bias=style.bias)
        self.out = nn.Linear(self.heads * self.dim, hidden, bias=style.bias)
        self.up = nn.Linear(hidden, inner * (2 if style.gated else 1), bias=style.bias)
        self.down = nn.Linear(inner, hidden, bias=style.bias)
        self.norm1, self.norm2 = norm_of(style, hidden), norm_of(style, hidden)

    def attention(self, x: torch.Tensor, about: Attending) -> torch.Tensor:
        b, s, _ = x.shape
        widths = [self.heads, self.kv_heads, self.kv_heads]
        parts = self.qkv(x).view(b, s, sum(widths), self.dim).split(widths, dim=2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        if about.angles is not None:
            q, k = rotated(q, *about.angles), rotated(k, *about.angles)
        if about.score is None and about.mask is None:
            o = F.scaled_dot_product_attention(q, k, v)
        else:
            gqa = self.kv_heads != self.heads
            scale = None if self.style.scaled else 1.0
            options = None if about.tile == _TILE else {"BLOCK_M": about.tile, "BLOCK_N": about.tile}
            o = flex_attention(q, k, v, about.score, about.mask, scale=scale, enable_gqa=gqa, kernel_options=options)
        return self.out(o.transpose(1, 2).reshape(b, s, self.heads * self.dim))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        act = _ACTIVATIONS[self.style.activation]
        if not self.style.gated:
            return self.down(act(self.up(x)))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(act(gate) * up)

    def forward(self, x: torch.Tensor, about: Attending) -> torch.Tensor:
        if self.style.pre_norm:
            x = x + self.attention(self.norm1(x), about)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x, about))
        return self.norm2(x + self.mlp(x))


@dataclass(frozen=True)
class Attending:
    """What all layers share: the block mask, T5's bias, RoPE's cosines and sines."""

    mask: object = None
    score: Callable[..., torch.Tensor] | None = None
    angles: tuple[torch.Tensor, torch.Tensor] | None = None
    tile: int = _TILE


class Model(nn.Module):
    """From tokens or pixels to the last hidden state."""

    def __init__(self, style: Style, info: ExportInfo, hidden: int, vocab: int, about: Attending) -> None:
        super().__init__()
        site, self.style, self.about = info.sites[0], style, about
        self.layers = nn.ModuleList(Layer(style, hidden, s) for s in info.sites)
        if style.source == "pixels":
            self.patches = nn.Conv2d(3, hidden, _PATCH, _PATCH)
            self.first = nn.Parameter(torch.randn(1, 1, hidden))
        else:
            self.words = nn.Embedding(vocab, hidden)
        self.places = nn.Parameter(torch.randn(1, int(site.seq_q), hidden)) if style.positions else None
        self.norm = norm_of(style, hidden)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.style.source == "pixels":
            patches = self.patches(inputs).flatten(2).transpose(1, 2)
            x = torch.cat([self.first.expand(len(patches), -1, -1), patches], 1)
        else:
            x = self.words(inputs)
        if self.places is not None:
            x = x + self.places
        x = x if self.style.pre_norm else self.norm(x)
        for layer in self.layers:
            x = layer(x, self.about)
        return self.norm(x) if self.style.pre_norm else x


def norm_of(style: Style, hidden: int) -> nn.Module:
    return nn.RMSNorm(hidden, eps=1e-6) if style.rms else nn.LayerNorm(hidden, eps=1e-5)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of [B, H, S, D], halves as transformers splits them."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attending(style: Style, site: SiteInfo, tile: int = _TILE) -> Attending:
    """Mask (in blocks of `tile`), bias and angles of a model."""
    seq, score, angles, block_mask = int(site.seq_q), None, None, None
    kind = site.mask.kind if site.mask is not None else "none"
    rule: Callable[..., torch.Tensor] | None = None
    if kind == "causal":
        rule = lambda b, h, q, k: k <= q  # noqa: E731  (traced as it stands)
    elif site.mask is not None and kind == "window" and not site.mask.causal:
        width = site.mask.width
        rule = lambda b, h, q, k: (q - k).abs() <= width  # noqa: E731
    elif site.mask is not None and kind != "none":
        allowed = torch.from_numpy(site.mask.rows(0, seq)).to(DEVICE)
        rule = lambda b, h, q, k: allowed[q, k]  # noqa: E731
    if rule is not None:
        block_mask = create_block_mask(rule, None, None, seq, seq, device=DEVICE, BLOCK_SIZE=tile)
    if style.relative:
        table = torch.randn(site.heads, 2 * seq - 1, device=DEVICE, dtype=DTYPE)
        score = lambda s, b, h, q, k: s + table[h, k - q + seq - 1]  # noqa: E731  (traced as it stands)
    if style.rope:
        steps = torch.arange(0, site.head_dim, 2, device=DEVICE, dtype=torch.float32) / site.head_dim
        turns = torch.arange(seq, device=DEVICE, dtype=torch.float32)[:, None] * _ROPE_BASE**-steps
        both = torch.cat([turns, turns], -1)
        angles = both.cos().to(DTYPE), both.sin().to(DTYPE)
    return Attending(block_mask, score, angles, tile)


def built(info: ExportInfo, tile: int = _TILE) -> tuple[Model, torch.Tensor]:
    """The model and random inputs."""
    site, given = info.sites[0], info.inputs[0]
    style, hidden, vocab = STYLES[info.family], int(info.options["hidden"]), int(info.options["vocab"])
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Model(style, info, hidden, vocab, attending(style, site, tile)).to(DTYPE).eval()
    shape = [size for size in given.shape if isinstance(size, int)]
    if style.source == "pixels":
        return model, torch.randn(shape, device=DEVICE, dtype=DTYPE)
    return model, torch.randint(0, given.high, shape, device=DEVICE)


def prepare(path: Path, mode: str, tile: int = _TILE) -> tuple[dict[str, object], Callable[[], object]]:
    """The line's facts and a compiled inference, called twice."""
    info = ExportInfo.load(path)
    model, inputs = built(info, tile)
    torch._dynamo.reset()
    compiled = torch.compile(model, mode=mode, dynamic=False)
    for _ in range(2):
        compiled(inputs)
    site = info.sites[0]
    mask = site.mask.kind if site.mask is not None else "none"
    facts = {"model": path.stem.rpartition("-")[0], "mask": mask, "B": len(inputs), "S": int(site.seq_q)}
    return facts | {"layers": len(info.sites), "mode": mode, "tile": tile}, lambda: compiled(inputs)


def _tiles(path: Path) -> tuple[int, ...]:
    """BigBird's blocks are of 64 tokens: FlexAttention is tried with both."""
    return (_TILE, 64) if "bigbird" in path.name and "x128x" not in path.name else (_TILE,)


def main() -> None:
    """Compiles and times every model; each line is written at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.json")
    parser.add_argument("--mode", default="max-autotune-no-cudagraphs", help="of torch.compile")
    parser.add_argument("--pause", type=Path, metavar="FOLDER", help="of the processes that timings stop")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit, alone = 1000, joined(arguments.pause)
    with torch.no_grad():
        for path, tile in ((p, t) for p in arguments.models for t in _tiles(p)):
            try:
                line, run = prepare(path, arguments.mode, tile)
                with alone():
                    line |= {"compile_ms": round(milliseconds(run), 4), "torch": torch.__version__}
            except Exception as error:  # the next model may still run
                line = {"model": path.stem, "failed": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(line), flush=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
