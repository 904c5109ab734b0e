"""The encoder of benchmarks.encoder in torch.compile with FlexAttention: same weights, mask and machine.

    python -m benchmarks.compile_peer --case window:16x2048 ... [--mode default ...] [--pause FOLDER] [--out FILE]

fp16, Q, K and V from one packed projection, block mask built ahead, timed by CUDA-graph replay. Everything is compiled
first; `--pause` names the folder of a run's processes (benchmarks.pausing), which timings stop. BigBird is tried with
FlexAttention's blocks of 128 and of 64. One JSON line a case, mode and tile: mask, B, S, layers, mode, tile,
compile_ms, err_compile (relative, against float32 on the first batch entry), torch. Needs torch, numpy and onnx,
nothing of stof_onnx.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.encoder import EncoderSpec, build_encoder, make_mask, window_width
from benchmarks.pausing import Pausing

_REPLAYS, _CALLS = 25, 5


class Encoder(torch.nn.Module):
    """Post-norm layers with packed QKV; `weights` as build_encoder names them."""

    def __init__(
        self,
        spec: EncoderSpec,
        weights: dict[str, np.ndarray],
        dtype: torch.dtype,
        options: dict[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.dtype, self.options = spec, dtype, options
        for layer in range(spec.layers):
            at = f"layer{layer}"
            self._keep(f"{at}_qkv_w", np.concatenate([weights[f"{at}/{p}/w"] for p in "qkv"], 1).T)
            self._keep(f"{at}_qkv_b", np.concatenate([weights[f"{at}/{p}/b"] for p in "qkv"]))
            for part in ("out", "fc1", "fc2"):
                self._keep(f"{at}_{part}_w", weights[f"{at}/{part}/w"].T)
                self._keep(f"{at}_{part}_b", weights[f"{at}/{part}/b"])
            for part in ("ln1", "ln2"):
                self._keep(f"{at}_{part}_w", weights[f"{at}/{part}/scale"])
                self._keep(f"{at}_{part}_b", weights[f"{at}/{part}/shift"])

    def _keep(self, name: str, values: np.ndarray) -> None:
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to("cuda", self.dtype)
        self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor, mask: object) -> torch.Tensor:
        batch, seq, hidden = x.shape
        heads = self.spec.heads
        for layer in range(self.spec.layers):

            def dense(t: torch.Tensor, part: str, at: str = f"layer{layer}") -> torch.Tensor:
                return F.linear(t, getattr(self, f"{at}_{part}_w"), getattr(self, f"{at}_{part}_b"))

            def norm(t: torch.Tensor, part: str, at: str = f"layer{layer}") -> torch.Tensor:
                return F.layer_norm(
                    t, (hidden,), getattr(self, f"{at}_{part}_w"), getattr(self, f"{at}_{part}_b"), 1e-5
                )

            q, k, v = dense(x, "qkv").view(batch, seq, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
            if isinstance(mask, torch.Tensor):
                attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            else:
                attended = flex_attention(q, k, v, block_mask=mask, kernel_options=self.options)
            x = norm(dense(attended.transpose(1, 2).reshape(batch, seq, hidden), "out") + x, "ln1")
            x = norm(dense(F.gelu(dense(x, "fc1")), "fc2") + x, "ln2")
        return x


def mask_rule(kind: str, dense: np.ndarray) -> Callable[..., torch.Tensor]:
    """The mask as FlexAttention likes it best: arithmetic where there is a rule, a table for BigBird."""
    width = window_width(len(dense))
    if kind == "causal":
        return lambda b, h, q, k: k <= q
    if kind == "window":
        return lambda b, h, q, k: (q - k).abs() <= 64
    if kind == "longformer":
        return lambda b, h, q, k: ((q - k).abs() <= width) | (q < width) | (k < width)
    table = torch.from_numpy(dense).cuda()  # one look-up an element is three times as fast as block arithmetic
    return lambda b, h, q, k: table[q, k]


def prepare(
    kind: str, batch: int, seq: int, mode: str, tile: int, layers: int, seed: int
) -> tuple[Callable[[], object], float]:
    """A compiled inference, called twice, and its relative error. `tile`: FlexAttention's block size."""
    spec = EncoderSpec(layers, 768, 12, batch, seq, seed=seed)
    weights = {t.name: numpy_helper.to_array(t) for t in build_encoder(spec, None).graph.initializer}
    dense = make_mask(kind, seq)
    values = np.random.default_rng(seed + 1).standard_normal((batch, seq, 768), np.float32)
    block_mask = create_block_mask(mask_rule(kind, dense), None, None, seq, seq, device="cuda", BLOCK_SIZE=tile)
    x = torch.from_numpy(values).cuda().half()
    torch._dynamo.reset()
    options = None if tile == 128 else {"BLOCK_M": tile, "BLOCK_N": tile}  # its own choice is 128 rows
    compiled = torch.compile(Encoder(spec, weights, torch.half, options), mode=mode, dynamic=False)
    got = compiled(x, block_mask)[0].float()
    compiled(x, block_mask)
    full = Encoder(spec, weights, torch.float32)
    expected = full(torch.from_numpy(values[:1]).cuda(), torch.from_numpy(dense).cuda())[0]
    error = float((got - expected).abs().max() / expected.abs().max())
    return lambda: compiled(x, block_mask), error


def milliseconds(run: Callable[[], object]) -> float:
    """Median of CUDA-graph replays."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _CALLS)
    return float(np.median(times))


def main() -> None:
    """Compiles every case, waits for the gate, times every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, metavar="MASK:BxS[xLAYERS]")
    parser.add_argument("--mode", action="append", help="of torch.compile; default: default")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--pause", type=Path, metavar="FOLDER", help="of the processes that timings stop")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 1000
    torch.set_float32_matmul_precision("highest")
    prepared, alone = [], joined(arguments.pause)
    with torch.no_grad():
        for mode, case in itertools.product(arguments.mode or ["default"], arguments.case):
            kind, sizes = case.split(":")
            batch, seq, layers = (*map(int, sizes.split("x")), arguments.layers)[:3]
            for tile in (128, 64) if kind == "bigbird" and seq > 128 else (128,):
                line = {"mask": kind, "B": batch, "S": seq, "layers": layers, "mode": mode, "tile": tile}
                try:
                    run, line["err_compile"] = prepare(kind, batch, seq, mode, tile, layers, arguments.seed)
                    prepared.append((line, run))
                except Exception as error:  # the next case may still run
                    print(json.dumps(line | {"failed": str(error)[:300]}), flush=True)
        print(f"{len(prepared)} compiled", flush=True)
        for line, run in prepared:
            with alone():
                line |= {"compile_ms": round(milliseconds(run), 4), "torch": torch.__version__}
            print(json.dumps(line), flush=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def joined(folder: Path | None) -> Callable[[], AbstractContextManager[None]]:
    """Joins the run of that folder, if there is one; what to time within."""
    if folder is None:
        return nullcontext
    pausing = Pausing(folder)
    pausing.join()
    return pausing.alone


if __name__ == "__main__":
    main()
