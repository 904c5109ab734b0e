"""One case: correctness on sampled rows, our kernel's time, every peer's time, in one process on one mask."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from . import floors, ours, peers, timing
from .cases import Case
from .masks import MASKS, BenchMask

SAMPLED_ROWS = 128


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


def warm_and_cold(run: Callable[..., object], case: Case, layout: str, cold: bool) -> tuple[float, float | None]:
    """(warm, cold) microseconds of one call of `run(q, k, v)`."""
    first = draw(case, layout)
    warm = timing.graph_us([lambda: run(*first)] * timing.CALLS)
    if not cold:
        return warm, None
    io = 4 * first[0].numel() * first[0].element_size()
    sets = [first, *(draw(case, layout) for _ in range(timing.cold_sets(io) - 1))]
    if len(sets) == 1:
        return warm, warm
    return warm, timing.graph_us([lambda s=s: run(*s) for s in sets])  # type: ignore[misc]


def measure(case: Case, arch_path: str, peer_names: tuple[str, ...], cold: bool) -> dict[str, Any]:
    """Everything of a results line that depends on the case. A wrong peer's time is not recorded."""
    mask = MASKS[case.mask](case.seq)
    torch.manual_seed(time.time_ns() % 2**31)
    encoded = ours.encode(mask, case.seq)
    kernel = ours.Ours(encoded, case, arch_path)
    qkv = draw(case, "BHSD")
    out = kernel(*qkv)
    torch.cuda.synchronize()
    err = errors(case, mask, qkv, {"ours": out})
    warm, cold_us = warm_and_cold(kernel, case, "BHSD", cold)
    mhz = clock_mhz()
    props = torch.cuda.get_device_properties(0)
    f = floors.floor(
        case.batch, case.heads, case.kv_heads or case.heads, case.seq, case.dim, qkv[0].element_size(),
        ours.nonempty_tiles(encoded), props.multi_processor_count, mhz,
    )  # fmt: skip
    line: dict[str, Any] = {
        "arch_path": arch_path, "mask": mask.name, "B": case.batch, "Hq": case.heads,
        "Hkv": case.kv_heads or case.heads, "Sq": case.seq, "Skv": case.seq, "D": case.dim, "dtype": case.dtype,
        "density": round(ours.density(encoded), 5), "ours_us": round(warm, 2),
        "ours_cold_us": None if cold_us is None else round(cold_us, 2), "kernel": kernel.name,
        "config": kernel.config, "floor_us": round(f.us, 2),
        "floor": {"io": round(f.io_us, 2), "mma": round(f.mma_us, 2), "exp": round(f.exp_us, 2), "sm_mhz": mhz},
        "max_err": err["ours"], "ref_err": err["torch"], "correct": err["ours"] <= 2 * err["torch"] + 1e-5,
        "io_bytes": (2 * qkv[0].numel() + 2 * qkv[1].numel()) * qkv[0].element_size(),
        "extra_bytes": kernel.extra_bytes, "dense_mask_bytes": case.seq**2,
        "peers": {}, "peers_cold": {}, "peer_errors": {},
    }  # fmt: skip
    del out, kernel
    for name in peer_names:
        measure_peer(name, case, mask, cold, line)
    for group, names in peers.GROUPS.items():
        for field in ("peers", "peers_cold"):
            times = [line[field][n] for n in names if n in line[field]]
            if times:
                line[field][group] = min(times)
    return line


def measure_peer(name: str, case: Case, mask: BenchMask, cold: bool, line: dict[str, Any]) -> None:
    """Adds the peer's time to `line`, or why there is none."""
    layout = "BSHD" if name.startswith("fa4") else "BHSD"
    try:
        run = peers.make(name, mask, case.seq)
        if run is None:
            return
        qkv = draw(case, layout)
        err = errors(case, mask, qkv, {name: run(*qkv)})
        if err[name] > 4 * err["torch"] + 1e-3:
            line["peer_errors"][name] = f"wrong: max error {err[name]:.2g}, torch {err['torch']:.2g}"
            return
        warm, cold_us = warm_and_cold(run, case, layout, cold)
        line["peers"][name] = round(warm, 2)
        if cold_us is not None:
            line["peers_cold"][name] = round(cold_us, 2)
    except Exception as e:  # a peer that cannot run a case is a result, not a failure of the benchmark
        line["peer_errors"][name] = f"{type(e).__name__}: {e}".splitlines()[0][:200]
    finally:
        torch.cuda.empty_cache()
