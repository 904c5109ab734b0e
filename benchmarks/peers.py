"""What other optimizers make of the grid of exports: `python -m benchmarks.peers [--jobs 2] [--only TEXT] [--resume]`.

Two peers, each asked as its documentation says in every mode that could fit the architecture; the best answer counts:
onnxruntime.transformers' optimizer ("ort") and onnxscript's fusions for ONNX Runtime ("onnxscript"). An attention is
fused where it became one com.microsoft operator; that its mask stays a dense input is not held against them. The result
must run and agree with the original, on unpadded and padded inputs, leaving out the rows that are padding. Results go
to build/grid/peers.json, where the table of the grid takes them from.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from stof_models.grid import GridCase, export_case, grid
from stof_models.info import ExportInfo

RESULTS = Path(__file__).parents[1] / "build" / "grid" / "peers.json"
EXPORTS = RESULTS.with_name("exports")  # exported models, kept between runs

FUSED = frozenset({"Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention"})
# Largest difference relative to the output's magnitude: generous, a wrong mask is off by far more.
TOLERANCE = {"fp32": 1e-3, "fp16": 3e-2}
# The modes of onnxruntime.transformers.optimizer that could fit, the documented one first.
_ORT_MODES = {
    "bert": ("bert",),
    "modernbert": ("bert",),
    "t5-encoder": ("t5", "bert"),
    "t5-decoder": ("t5",),
    "gpt2": ("gpt2",),
    "llama": ("gpt2", "qwen3", "phi"),
    "mistral": ("gpt2", "qwen3", "phi"),
    "gemma2": ("gpt2", "qwen3"),
    "gemma3": ("gpt2", "qwen3"),
    "bart-decoder": ("bart",),
    "whisper": ("bart",),
    "vit": ("vit",),
    "swin": ("swin",),
}


@dataclass(frozen=True)
class PeerResult:
    """One peer on one model. `problem` is why the result can not be used, "" when it can."""

    fused: int
    problem: str = ""

    @property
    def usable(self) -> int:
        """Fused attentions of a result that runs and is right."""
        return 0 if self.problem else self.fused

    def text(self, sites: int) -> str:
        """For a table: "2 of 2", or what went wrong."""
        return f"{self.fused} of {sites}" + (f", {self.problem}" if self.problem else "")


def judge(path: Path, info: ExportInfo) -> dict[str, PeerResult]:
    """Each peer's best result on the model at `path`, by the peer's name."""
    samples = _samples(path, info)
    heads, hidden = info.options["heads"], info.options["hidden"]
    results = {}
    for name, attempts in (
        ("ort", _ort_attempts(path, info.family, heads, hidden)),
        ("onnxscript", [lambda target: _onnxscript(path, target)]),
    ):
        best = PeerResult(-1)
        for attempt in attempts:
            result = _try(attempt, samples, info)
            best = max(best, result, key=lambda r: (r.usable, r.fused))
            if best.usable >= len(info.sites):
                break
        results[name] = best
    return results


def _try(attempt: Callable[[Path], None], samples: list[_Sample], info: ExportInfo) -> PeerResult:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "peer.onnx"
        try:
            with _quiet():
                attempt(target)
        except Exception as error:
            return PeerResult(0, f"fails ({type(error).__name__})")
        fused = _count(onnx.load(str(target)))
        try:
            session = _session(target)
            worst = max(_difference(sample, session) for sample in samples)
        except Exception:
            return PeerResult(fused, "does not run")
    limit = TOLERANCE[info.options["dtype"]]
    return PeerResult(fused, "" if worst <= limit else f"wrong by {worst:.1g}")


def _count(model: onnx.ModelProto) -> int:
    return sum(node.op_type in FUSED and node.domain == "com.microsoft" for node in model.graph.node)


def _ort_attempts(path: Path, family: str, heads: int, hidden: int) -> Iterator[Callable[[Path], None]]:
    """Every mode with its own and without ONNX Runtime's graph optimizations first, then those alone."""

    def attempt(mode: str, multi_head: bool, level: int | None, native: bool) -> Callable[[Path], None]:
        def run(target: Path) -> None:
            from onnxruntime.transformers.fusion_options import FusionOptions
            from onnxruntime.transformers.optimizer import optimize_model

            options = FusionOptions(mode)
            options.use_multi_head_attention = multi_head
            options.use_raw_attention_mask(True)  # the default takes padding to be on the right
            model = optimize_model(
                str(path),
                mode,
                num_heads=heads,
                hidden_size=hidden,
                optimization_options=options,
                opt_level=level,
                only_onnxruntime=native,
            )
            model.save_model_to_file(str(target))

        return run

    for mode in _ORT_MODES[family]:
        for level in (None, 0):
            for multi_head in (False, True):
                yield attempt(mode, multi_head, level, False)
    yield attempt(_ORT_MODES[family][0], False, 2, True)


def _onnxscript(path: Path, target: Path) -> None:
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model, _ = optimize_for_ort(ir.load(str(path)))
    ir.save(model, str(target))


@dataclass(frozen=True)
class _Sample:
    """Inputs, the original's outputs, and which tokens of each output are not padding (None: all)."""

    feed: dict[str, np.ndarray]
    outputs: list[np.ndarray]
    kept: np.ndarray | None


def _samples(path: Path, info: ExportInfo) -> list[_Sample]:
    session = _session(path)
    rng = np.random.default_rng(0)
    samples = []
    for padded in (False, True):
        feed = info.random_inputs(rng, padded=padded)
        names = ("attention_mask", "decoder_attention_mask")
        kept = next((feed[name] != 0 for name in names if name in feed), None)
        samples.append(_Sample(feed, session.run(None, feed), kept))
    return samples


def _difference(sample: _Sample, session: ort.InferenceSession) -> float:
    worst = 0.0
    for want, got in zip(sample.outputs, session.run(None, sample.feed), strict=True):
        if want.shape != got.shape:
            return np.inf
        want, got = want.astype(np.float64), got.astype(np.float64)
        if sample.kept is not None and sample.kept.shape == want.shape[:2]:
            want, got = want[sample.kept], got[sample.kept]
        # NaN compares false everywhere: one that only the peer has counts as infinitely wrong.
        error = np.where(np.isnan(want), 0.0, np.nan_to_num(np.abs(got - want), nan=np.inf))
        worst = max(worst, float(error.max() / np.nanmax(np.abs(want))))
    return worst


def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Both peers log every pattern that does not match."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def run_case(case: GridCase) -> tuple[str, dict[str, str]]:
    """Both peers on one case of the grid; empty where the exporter fails."""
    try:
        path, info = export_case(case, EXPORTS)
        found = judge(path, info)
    except Exception:  # the grid's own table says what fails without any optimizer
        return case.name, {}
    return case.name, {peer: result.text(len(info.sites)) for peer, result in found.items()}


def main() -> int:
    """Prints one line for each case and the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that have a result")
    arguments = parser.parse_args()
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    cases = [c for c in grid() if arguments.only in c.name and not (arguments.resume and c.name in results)]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for number, (name, found) in enumerate(pool.map(run_case, cases), 1):
            results[name] = found
            print(f"{number}/{len(cases)} {name}: {found or 'not exported'}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
