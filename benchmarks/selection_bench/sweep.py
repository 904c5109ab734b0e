"""Times every configuration of a case on this GPU and checks each against float64 on sampled rows.

Masks are encoded and lowered by worker processes while the GPU works.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from stof_onnx.kernels.configs import KernelConfig, KernelSite, candidates, lower
from stof_onnx.mask import EncodedMask, encode_bands

from .cases import Case, source

SAMPLED_ROWS = 64
GRAPH_MS = 0.4  # device time of one graph, which holds up to MOST_CALLS calls
MOST_CALLS = 20
BUDGET_MS = 10.0  # device time of one configuration's replays
LEAST_REPLAYS, MOST_REPLAYS = 5, 20
# A call that takes longer than SLOW_MS, or longer than HOPELESS_MS and HOPELESS times the case's best, is timed once.
SLOW_MS, HOPELESS_MS, HOPELESS = 10.0, 0.3, 2.0
Lowered = tuple[KernelConfig, dict[str, np.ndarray], dict[str, Any]]


def site_of(case: Case) -> KernelSite:
    """The case as selection sees it."""
    return KernelSite(case.batch, case.heads, case.dim, case.dim, case.dtype, case.dim**-0.5, case.softcap)


def encoded(case: Case) -> EncodedMask:
    """The mask in portable tiles."""
    return encode_bands(source(case.mask, case.seq), case.seq, case.seq)


@dataclass(frozen=True)
class Prepared:
    """Everything of a case that needs no GPU: the sampled rows of its mask, and each configuration's arrays."""

    case: Case
    rows: np.ndarray
    allowed: np.ndarray
    lowered: list[Lowered]


def prepare(case: Case, arch: int) -> Prepared:
    """Encodes and lowers for every candidate."""
    mask, dense = encoded(case), source(case.mask, case.seq)
    rows = np.sort(np.random.default_rng().permutation(case.seq)[:SAMPLED_ROWS])
    allowed = np.concatenate([dense(int(r), int(r) + 1) for r in rows])
    return Prepared(case, rows, allowed, [(c, *lower(mask, c)) for c in candidates(mask, site_of(case), arch)])


def prepared(cases: Sequence[Case], arch: int, workers: int) -> Iterator[Prepared]:
    """`prepare` of all cases as they get ready, few ahead of the consumer."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        todo, running = list(cases), set[Future[Any]]()
        try:
            while todo or running:
                while todo and len(running) < 2 * workers:
                    running.add(pool.submit(prepare, todo.pop(0), arch))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def sweep(
    cases: Sequence[tuple[str, Case]], library_path: Path, out: Path, start: dict[str, Any], limit: float, workers: int
) -> int:
    """Appends one line a case to `out`; the number of wrong results.

    Args:
        cases: each with the name of its set.
        start: the fields that every line begins with.
        limit: seconds after which no further case starts.
    """
    import torch
    from stof_onnx.kernels import capi

    library, properties = capi.KernelLibrary(library_path), torch.cuda.get_device_properties(0)
    _raise_clock(torch)
    arch, begin, wrong = 10 * properties.major + properties.minor, time.monotonic(), 0
    sets = {case.key: name for name, case in cases}
    for number, ready in enumerate(prepared([case for _, case in cases], arch, workers)):
        case, bench = ready.case, _Bench(ready, library)
        us: dict[str, float] = {}
        errors: dict[str, str] = {}
        # The likely best come first: hopeless ones need not be timed well.
        for config, arrays, attributes in reversed(ready.lowered):
            result = bench.time(config, arrays, attributes, min(us.values(), default=float("inf")))
            if isinstance(result, str):
                errors[config.label] = result
            else:
                us[config.label] = round(result, 3)
        wrong += sum(e.startswith("wrong") for e in errors.values())
        line = {
            **start,
            "set": sets[case.key],
            "case": case.key,
            "sms": properties.multi_processor_count,
            "arch": arch,
            "us": us,
            "errors": errors,
        }
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        best = min(us, key=us.__getitem__) if us else "-"
        print(
            f"{number + 1}/{len(cases)} {time.monotonic() - begin:5.1f} s {case.key:40s} {len(us)} configurations, "
            f"best {best} {us.get(best, 0):.1f} us{' ' + str(errors) if errors else ''}",
            flush=True,
        )
        if time.monotonic() - begin > limit:
            print("time is up")
            break
    return wrong


def _raise_clock(torch: Any) -> None:
    """Keeps the GPU busy until its clock no longer rises."""
    square = torch.randn((8192, 8192), device="cuda", dtype=torch.float16)
    begin = time.monotonic()
    while time.monotonic() - begin < 0.7:
        _ = square @ square
        torch.cuda.synchronize()


class _Bench:
    """One case's tensors and reference."""

    def __init__(self, ready: Prepared, library: Any) -> None:
        import torch
        from stof_onnx.kernels import capi

        case = ready.case
        self.torch, self.capi, self.case, self.library = torch, capi, case, library
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
        shape = (case.batch, case.heads, case.seq, case.dim)
        self.q, self.k, self.v = (torch.randn(shape, device="cuda", dtype=self.dtype) for _ in range(3))
        self.rows, allowed = torch.from_numpy(ready.rows).cuda(), torch.from_numpy(ready.allowed).cuda()
        self.heads = sorted({(0, 0), (case.batch - 1, case.heads - 1)})
        self.exact, same = (self._reference(t, allowed) for t in (torch.float64, self.dtype))
        rounding = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-20}[case.dtype]
        self.tolerance = 2 * float((same.double() - self.exact).abs().max()) + rounding * float(self.exact.abs().max())

    def _reference(self, dtype: Any, allowed: Any) -> Any:
        outs = []
        for b, h in self.heads:
            q, k, v = (x.to(dtype) for x in (self.q[b, h, self.rows], self.k[b, h], self.v[b, h]))
            scores = q @ k.T * self.case.dim**-0.5
            if cap := self.case.softcap:
                scores = cap * (scores / cap).tanh()
            scores = scores.masked_fill(~allowed, float("-inf"))
            outs.append(scores.softmax(-1) @ v)
        return self.torch.stack(outs)

    def time(self, config: KernelConfig, arrays: dict[str, np.ndarray], a: dict[str, Any], best: float) -> float | str:
        """Microseconds of a call, or why there are none; `best`: of the configurations timed before."""
        torch, capi, c = self.torch, self.capi, self.case
        device = {n: torch.from_numpy(np.array(x)).cuda() for n, x in arrays.items()}
        view = capi.MaskView(
            **{n: x.data_ptr() for n, x in device.items()},
            **{n: int(a[f"mask_{n}"]) for n in ("n_masks", "rows", "cols", "n_full", "n_part")},
            tile_m=int(a["tile_m"]), tile_n=int(a["tile_n"]), split_rows=int(a["split_rows"]),
            bitmap_order=int(a["mask_fragment_order"]), index_b=1, index_h=1,
        )  # fmt: skip
        out = torch.full_like(self.q, float("nan"))
        views = [capi.TensorView(t.data_ptr(), *t.stride()[:3]) for t in (self.q, self.k, self.v, out)]
        p = capi.AttentionParams(
            q=views[0], k=views[1], v=views[2], o=views[3], batch=c.batch, heads=c.heads, kv_heads=c.heads, seq_q=c.seq,
            seq_kv=c.seq, dim=c.dim, v_dim=c.dim, dtype={"fp16": 0, "bf16": 1, "fp32": 2}[c.dtype], scale=c.dim**-0.5,
            softcap=c.softcap, mask=view, kernel=capi.Kernel[config.kernel.upper()], splits=config.splits,
            max_row_tiles=int(a["mask_max_row_tiles"]),
        )  # fmt: skip
        if reason := self.library.unsupported(p):
            return f"unsupported: {reason}"
        workspace = torch.empty(self.library.workspace_bytes(p) + 256, dtype=torch.uint8, device="cuda")
        p.workspace, p.workspace_bytes = workspace.data_ptr(), workspace.numel()

        def launch() -> None:
            self.library.forward(p, torch.cuda.current_stream().cuda_stream)

        launch()
        got = torch.stack([out[b, h, self.rows] for b, h in self.heads]).double()
        error = float((got - self.exact).abs().max())
        if not error <= self.tolerance:
            return f"wrong: {error:.3g} > {self.tolerance:.3g}"
        return self._median_us(launch, best)

    def _median_us(self, launch: Any, best: float) -> float:
        torch = self.torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        once = begin.elapsed_time(end)
        if once > SLOW_MS or (once > HOPELESS_MS and once * 1e3 > HOPELESS * best):
            return float(once * 1e3)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        calls = max(1, min(MOST_CALLS, int(GRAPH_MS / once)))
        with torch.cuda.stream(stream):
            torch.cuda.synchronize()
            graph.capture_begin()  # `torch.cuda.graph` would empty the allocator's cache as well
            for _ in range(calls):
                launch()
            graph.capture_end()
            times: list[float] = []
            while len(times) < LEAST_REPLAYS or (len(times) < MOST_REPLAYS and sum(times) < BUDGET_MS):
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
        return float(np.median(times[1:])) * 1e3 / calls
