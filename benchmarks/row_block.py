"""Row-wise against block-wise over density: where does touching only the allowed keys win?

    python benchmarks/row_block.py measure   # on a GPU, with `make cuda` done: rewrites the results
    python benchmarks/row_block.py draw      # docs/row_block_crossover.png from them

Masks: random elements plus the diagonal, and windows; 12 heads of 64, fp16. Times are medians of CUDA-graph replays.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "row_block_crossover.jsonl"
PICTURE = ROOT / "docs" / "row_block_crossover.png"
SHAPES = ((128, 16), (512, 16), (1024, 8), (128, 1), (512, 1), (1024, 1))  # S, B
DENSITIES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
BLOCK_TILES = ((64, 64), (64, 32), (128, 64))
HEADS, DIM = 12, 64


def allowed(pattern: str, seq: int, density: float) -> np.ndarray:
    distance = np.arange(seq)[:, None] - np.arange(seq)[None]
    if pattern == "random":
        return (np.random.default_rng(0).random((seq, seq)) < density) | (distance == 0)
    return np.abs(distance) <= max(1, int(density * seq / 2))


def measure() -> None:
    import torch
    from stof_onnx.kernels import capi
    from stof_onnx.mask import encode

    from tests.cuda.harness import device_mask, tensor_view

    def median_us(launch) -> float:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        with torch.cuda.stream(stream):
            launch()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(10):
                    launch()
            for _ in range(15):
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 100)
        return sorted(times)[len(times) // 2]

    library = capi.KernelLibrary(ROOT / capi.DEFAULT_LIBRARY)
    common = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "arch_path": "sm80",
        "dtype": "f16", "H": HEADS, "D": DIM,
    }  # fmt: skip
    with RESULTS.open("w") as file:
        for seq, batch in SHAPES:
            q, k, v = (torch.randn(batch, HEADS, seq, DIM, device="cuda", dtype=torch.float16) for _ in range(3))
            out = torch.empty_like(q)
            for pattern in ("random", "window"):
                for density in DENSITIES:
                    matrix, us = allowed(pattern, seq, density), {}
                    for name, tile in (("row", (64, 64)), *((f"{m}x{n}", (m, n)) for m, n in BLOCK_TILES)):
                        row_wise = name == "row"
                        mask = device_mask(encode(matrix, *tile), capi.BitmapOrder(0 if row_wise else 1))
                        p = capi.AttentionParams(
                            q=tensor_view(q), k=tensor_view(k), v=tensor_view(v), o=tensor_view(out), batch=batch,
                            heads=HEADS, kv_heads=HEADS, seq_q=seq, seq_kv=seq, dim=DIM, v_dim=DIM,
                            dtype=capi.DType.F16, scale=DIM**-0.5, mask=mask.view, splits=1,
                            kernel=capi.Kernel.ROW_WISE if row_wise else capi.Kernel.BLOCK_SM80,
                            max_row_tiles=mask.max_row_tiles,
                        )  # fmt: skip
                        us[name] = round(
                            median_us(lambda p=p: library.forward(p, torch.cuda.current_stream().cuda_stream)), 2
                        )
                    record = {**common, "pattern": pattern, "S": seq, "B": batch, "density": float(matrix.mean())}
                    file.write(json.dumps({**record, "us": us}) + "\n")
                    print(record["pattern"], seq, batch, f"{record['density']:.4f}", us, flush=True)


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    figure, grid = plt.subplots(2, 3, figsize=(11, 6.2), sharex=True)
    for axis, (seq, batch) in zip(grid[::-1].ravel(), SHAPES, strict=True):
        for pattern, colour in (("random", "C0"), ("window", "C1")):
            points = sorted(
                (r["density"], r["us"]["row"], min(t for name, t in r["us"].items() if name != "row"))
                for r in records
                if (r["S"], r["B"], r["pattern"]) == (seq, batch, pattern)
            )
            density, row, block = zip(*points, strict=True)
            axis.plot(density, row, colour + "o-", ms=3, label=f"row-wise, {pattern}")
            axis.plot(density, block, colour + "s--", ms=3, label=f"block-wise, {pattern}")
        axis.set(xscale="log", yscale="log", title=f"B={batch}, {HEADS} heads, S={seq}, D={DIM}")
        axis.grid(alpha=0.3, which="both")
    for axis in grid[1]:
        axis.set_xlabel("share of allowed elements")
    for axis in grid[:, 0]:
        axis.set_ylabel("µs a call")
    grid[0][0].legend(fontsize=7)
    figure.suptitle(f"Row-wise against block-wise (best tile), {records[0]['gpu']}, fp16")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "draw"))
    {"measure": measure, "draw": draw}[parser.parse_args().command]()
