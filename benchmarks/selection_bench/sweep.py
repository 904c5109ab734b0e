"""Times every configuration of a case on this GPU and checks each against float64 on sampled rows.

Masks are encoded and lowered by worker processes while the GPU works.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from stof_onnx.kernels.configs import KERNELS, KernelConfig, KernelSite, Tilings, candidates, lower
from stof_onnx.mask import EncodedMask, encode_bands

from .cases import Case, source

SAMPLED_ROWS = 64
GRAPH_MS, MOST_CALLS = 1.5, 50  # device time and calls of one graph, at most
WARM_MS, BUDGET_MS, LEAST_REPLAYS = 1.0, 4.0, 4  # device time of one look at a configuration
# A call that takes longer than SLOW_MS, or longer than HOPELESS_MS and HOPELESS times the case's best, is timed once.
# Those within CONTENDER times the best are looked at LOOKS times more, in turn.
SLOW_MS, HOPELESS_MS, HOPELESS, CONTENDER, LOOKS = 10.0, 0.3, 2.0, 1.2, 3
Lowered = tuple[KernelConfig, dict[str, np.ndarray], dict[str, Any]]


def site_of(case: Case) -> KernelSite:
    """The case as selection sees it."""
    return KernelSite(case.batch, case.heads, case.dim, case.dim, case.dtype, case.dim**-0.5, case.softcap)


def encoded(case: Case) -> EncodedMask:
    """The mask in portable tiles."""
    return encode_bands(source(case.mask, case.seq), case.seq, case.seq)


@dataclass(frozen=True)
class Planned:
    """A case, the set that it belongs to, and the kernel families to time."""

    set: str
    case: Case
    kernels: tuple[str, ...] = KERNELS


@dataclass(frozen=True)
class Prepared:
    """Everything of a case that needs no GPU: the sampled rows of its mask, and each configuration's arrays."""

    case: Case
    rows: np.ndarray
    allowed: np.ndarray
    lowered: list[Lowered]


def prepare(case: Case, arch: int, kernels: Sequence[str] = KERNELS) -> Prepared:
    """Encodes and lowers for every candidate of these kernel families."""
    mask, dense = encoded(case), source(case.mask, case.seq)
    rows = np.sort(np.random.default_rng().permutation(case.seq)[:SAMPLED_ROWS])
    allowed = np.concatenate([dense(int(r), int(r) + 1) for r in rows])
    configs = candidates(Tilings(mask), site_of(case), arch, tuple(kernels))
    return Prepared(case, rows, allowed, [(c, *lower(mask, c)) for c in configs])


def prepared(cases: Sequence[Planned], arch: int, workers: int) -> Iterator[Prepared]:
    """`prepare` of all cases as they get ready, few ahead of the consumer."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        todo, running = list(cases), set[Future[Any]]()
        try:
            while todo or running:
                while todo and len(running) < 2 * workers:
                    following = todo.pop(0)
                    running.add(pool.submit(prepare, following.case, arch, following.kernels))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def sweep(
    cases: Sequence[Planned], library_path: Path, out: Path, start: dict[str, Any], limit: float, workers: int
) -> int:
    """Appends one line a case to `out`; the number of wrong results.

    Args:
        start: the fields that every line begins with.
        limit: seconds after which no further case starts.
    """
    import torch
    from stof_onnx.kernels import capi

    library, properties = capi.KernelLibrary(library_path), torch.cuda.get_device_properties(0)
    _raise_clock(torch, 0.7)
    arch, begin, wrong = 10 * properties.major + properties.minor, time.monotonic(), 0
    sets = {planned.case.key: planned.set for planned in cases}
    for number, ready in enumerate(prepared(cases, arch, workers)):
        _raise_clock(torch, 0.01)
        case, bench = ready.case, _Bench(ready, library)
        us, errors = bench.times(ready.lowered)
        wrong += sum(e.startswith("wrong") for e in errors.values())
        line = {
            **start,
            "set": sets[case.key],
            "case": case.key,
            "sms": properties.multi_processor_count,
            "arch": arch,
            "us": {label: round(value, 3) for label, value in us.items()},
            "errors": errors,
        }
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        best = min(us, key=us.__getitem__) if us else "-"
        seconds = time.monotonic() - begin
        print(
            f"{number + 1}/{len(cases)} {seconds:5.1f} s {case.key:40s} {len(us)}, best {best} {us.get(best, 0):.1f} us"
        )
        print(*(f"    {label}: {why}\n" for label, why in errors.items()), sep="", end="", flush=True)
        if time.monotonic() - begin > limit:
            print("time is up")
            break
    return wrong


def _raise_clock(torch: Any, seconds: float) -> None:
    """Keeps the GPU busy so that its clock does not fall between cases."""
    square = torch.randn((8192, 8192), device="cuda", dtype=torch.float16)
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
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

    def times(self, lowered: Sequence[Lowered]) -> tuple[dict[str, float], dict[str, str]]:
        """Microseconds of a call of each configuration, and why others have none."""
        us: dict[str, float] = {}
        errors: dict[str, str] = {}
        looks: dict[str, list[float]] = {}
        graphs: dict[str, _Graph] = {}
        # The likely best come first: hopeless ones need not be timed well.
        for config, arrays, attributes in reversed(lowered):
            launch = self.launch(config, arrays, attributes)
            if isinstance(launch, str):
                errors[config.label] = launch
                continue
            once = self._once_ms(launch)
            us[config.label] = 1e3 * once
            if once > SLOW_MS or (once > HOPELESS_MS and 1e3 * once > HOPELESS * min(us.values())):
                continue
            graphs[config.label] = _Graph(self.torch, launch, once)
            looks[config.label] = graphs[config.label].look()
            us[config.label] = float(np.median(looks[config.label]))
        contenders = [label for label in graphs if us[label] <= CONTENDER * min(us.values())]
        for label in contenders * LOOKS:
            looks[label] += graphs[label].look()
        return us | {label: float(np.median(looks[label])) for label in contenders}, errors

    def launch(
        self, config: KernelConfig, arrays: dict[str, np.ndarray], a: dict[str, Any]
    ) -> Callable[[], None] | str:
        """The call, checked; or why there is none."""
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

        def launch(_holds: Any = (device, out, workspace)) -> None:
            self.library.forward(p, torch.cuda.current_stream().cuda_stream)

        launch()
        got = torch.stack([out[b, h, self.rows] for b, h in self.heads]).double()
        error = float((got - self.exact).abs().max())
        if not error <= self.tolerance:
            return f"wrong: {error:.3g} > {self.tolerance:.3g}"
        return launch

    def _once_ms(self, launch: Callable[[], None]) -> float:
        """The better of two calls: the host may stumble in one."""
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        while len(times) < 2:
            begin.record()
            launch()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)))
        return min(times)


class _Graph:
    """Some calls as a CUDA graph."""

    def __init__(self, torch: Any, launch: Callable[[], None], once_ms: float) -> None:
        self._launch = launch  # holds the tensors
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self._torch, self._calls = torch, max(1, min(MOST_CALLS, int(GRAPH_MS / once_ms)))
        with torch.cuda.stream(self._stream):
            torch.cuda.synchronize()
            self._graph.capture_begin()  # `torch.cuda.graph` would empty the allocator's cache as well
            for _ in range(self._calls):
                launch()
            self._graph.capture_end()

    def look(self) -> list[float]:
        """Microseconds a call of some replays, after some that are not counted."""
        with self._torch.cuda.stream(self._stream):
            warm, spent = 0.0, 0.0
            times: list[float] = []
            while warm < WARM_MS:
                warm += self._replay_ms()
            while len(times) < LEAST_REPLAYS or spent < BUDGET_MS:
                times.append(self._replay_ms())
                spent += times[-1]
        return [1e3 * t / self._calls for t in times]

    def _replay_ms(self) -> float:
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))
