"""One case: correctness on sampled rows, our kernel's time, every peer's time, in one process on one mask."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from stof_onnx.mask import EncodedMask

from . import floors, ours, peers, timing
from .cases import Case
from .gate import gate, time_box
from .masks import MASKS, BenchMask

SAMPLED_ROWS = 128
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def draw(case: Case, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fresh normal Q, K, V as [B, H, S, D]; layout "BSHD" makes them views of [B, S, H, D] memory."""
    out = []
    for h in (case.heads, case.kv_heads or case.heads, case.kv_heads or case.heads):
        shape = (case.batch, case.seq, h, case.dim) if layout == "BSHD" else (case.batch, h, case.seq, case.dim)
        x = torch.randn(shape, device="cuda", dtype=getattr(torch, case.dtype))
        out.append(x.transpose(1, 2) if layout == "BSHD" else x)
    return out[0], out[1], out[2]


def errors(
    case: Case, mask: BenchMask, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], outs: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Largest absolute error on sampled rows against float64, of each output and ("torch") of plain torch."""
    q, k, v = qkv
    g = torch.Generator().manual_seed(case.seq)
    rows = torch.randperm(case.seq, generator=g)[:SAMPLED_ROWS].sort().values.cuda()
    allowed = mask.on("cuda")(rows[:, None], torch.arange(case.seq, device="cuda")[None])
    worst = dict.fromkeys([*outs, "torch"], 0.0)
    for b, h in {(0, 0), (case.batch - 1, case.heads - 1)}:
        hk = h // (case.heads // (case.kv_heads or case.heads))
        reference: torch.Tensor | None = None
        for dtype in (torch.float64, q.dtype):
            qq, kk, vv = (x.to(dtype) for x in (q[b, h, rows], k[b, hk], v[b, hk]))
            scores = (qq @ kk.T * case.dim**-0.5).masked_fill(~allowed, float("-inf"))
            out = scores.softmax(-1) @ vv
            if reference is None:
                reference = out
            else:
                worst["torch"] = max(worst["torch"], float((out.double() - reference).abs().max()))
        assert reference is not None
        for name, o in outs.items():
            err = (o[b, h, rows].double() - reference).abs().max()
            worst[name] = max(worst[name], float(err) if bool(torch.isfinite(err)) else float("inf"))
    return worst


def clock_mhz() -> float:
    """The SM clock right now, MHz."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


@dataclass(frozen=True)
class Effort:
    """How much is measured: cold-L2 times too or not, device time of one timing's replays, time box of a peer."""

    cold: bool = True
    budget_ms: float = 150.0
    peer_seconds: float = 0.0


def warm_and_cold(run: Callable[..., object], case: Case, layout: str, effort: Effort) -> tuple[float, float | None]:
    """(warm, cold) microseconds of one call of `run(q, k, v)`."""
    first = draw(case, layout)
    warm = timing.graph_us(timing.repeated(lambda: run(*first), effort.budget_ms), budget_ms=effort.budget_ms)
    if not effort.cold:
        return warm, None
    io = 4 * first[0].numel() * first[0].element_size()
    sets = [first, *(draw(case, layout) for _ in range(timing.cold_sets(io) - 1))]
    if len(sets) == 1:
        return warm, warm
    return warm, timing.graph_us([lambda s=s: run(*s) for s in sets], budget_ms=effort.budget_ms)  # type: ignore[misc]


def memory_bytes(run: Callable[[], object]) -> int:
    """Device memory that `run` needs at its peak, beside what is allocated before: torch's own count."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, arch_path: str, peer_names: tuple[str, ...], effort: Effort) -> dict[str, Any]:
    """Everything of a results line that depends on the case. A wrong peer's time is not recorded."""
    mask = MASKS[case.mask](case.seq)
    torch.manual_seed(time.time_ns() % 2**31)
    encoded = ours.encode(mask, case.seq)
    lowered = ours.lowered(encoded, case, arch_path)
    with gate.held():
        line = measure_ours(lowered, case, mask, effort)
    tiles, density = ours.nonempty_tiles(encoded), ours.density(encoded)
    f = floors.floor(
        case.batch, case.heads, case.kv_heads or case.heads, case.seq, case.dim, ELEMENT_BYTES[case.dtype], tiles,
        torch.cuda.get_device_properties(0).multi_processor_count, line["floor"]["sm_mhz"],
    )  # fmt: skip
    line |= {
        "arch_path": arch_path, "mask": mask.name, "B": case.batch, "Hq": case.heads,
        "Hkv": case.kv_heads or case.heads, "Sq": case.seq, "Skv": case.seq, "D": case.dim, "dtype": case.dtype,
        "density": round(density, 5), "floor_us": round(f.us, 2),
        "floor": {"io": round(f.io_us, 2), "mma": round(f.mma_us, 2), "exp": round(f.exp_us, 2), **line["floor"]},
        "dense_mask_bytes": case.seq**2, "peers": {}, "peers_cold": {}, "peer_errors": {}, "peer_bytes": {},
    }  # fmt: skip
    for name in peer_names:
        measure_peer(name, case, mask, encoded, effort, line)
    for group, names in peers.GROUPS.items():
        for field in ("peers", "peers_cold"):
            times = [line[field][n] for n in names if n in line[field]]
            if times:
                line[field][group] = min(times)
    return line


def measure_ours(lowered: ours.Lowered, case: Case, mask: BenchMask, effort: Effort) -> dict[str, Any]:
    """Our kernel: memory of one call from nothing, error on sampled rows, times."""
    free_before = free_bytes()
    held: list[Any] = []

    def once() -> None:
        kernel, qkv = ours.Ours(lowered, case), draw(case, "BHSD")
        held.extend((kernel, qkv, kernel(*qkv)))

    peak = memory_bytes(once)
    driver_bytes = free_before - free_bytes()
    kernel, qkv, out = held
    held.clear()
    err = errors(case, mask, qkv, {"ours": out})
    del out
    warm, cold = warm_and_cold(kernel, case, "BHSD", effort)
    return {
        "ours_us": round(warm, 2), "ours_cold_us": None if cold is None else round(cold, 2), "kernel": kernel.name,
        "config": kernel.config, "floor": {"sm_mhz": clock_mhz()}, "max_err": err["ours"], "ref_err": err["torch"],
        "correct": err["ours"] <= 2 * err["torch"] + 1e-5,
        "io_bytes": (2 * qkv[0].numel() + 2 * qkv[1].numel()) * qkv[0].element_size(),
        "extra_bytes": kernel.extra_bytes, "peak_bytes": peak, "driver_bytes": None if gate.shared else driver_bytes,
    }  # fmt: skip


def free_bytes() -> int:
    """Free device memory as the driver sees it (other processes on the GPU count)."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def measure_peer(
    name: str, case: Case, mask: BenchMask, encoded: EncodedMask, effort: Effort, line: dict[str, Any]
) -> None:
    """Adds the peer's time and memory (Q, K, V, O included) to `line`, or why there are none."""
    layout = "BSHD" if name.startswith("fa4") else "BHSD"
    try:
        with gate.held(), time_box(effort.peer_seconds):
            held: list[Any] = []

            def once() -> None:
                run = peers.make(name, mask, encoded)
                if run is not None:
                    qkv = draw(case, layout)
                    held.extend((run, qkv, run(*qkv)))

            peak = memory_bytes(once)
            if not held:
                return
            run, qkv, out = held
            held.clear()
            line["peer_bytes"][name] = peak
            err = errors(case, mask, qkv, {name: out})
            del out
            if err[name] > 4 * err["torch"] + 1e-3:
                line["peer_errors"][name] = f"wrong: max error {err[name]:.2g}, torch {err['torch']:.2g}"
                return
            warm, cold = warm_and_cold(run, case, layout, effort)
        line["peers"][name] = round(warm, 2)
        if cold is not None:
            line["peers_cold"][name] = round(cold, 2)
    except Exception as e:  # a peer that cannot run a case is a result, not a failure of the benchmark
        line["peer_errors"][name] = f"{type(e).__name__}: {e}".splitlines()[0][:200]
    finally:
        torch.cuda.empty_cache()
