"""Measures the whole space of fused regions of a model on a GPU: every configuration and every piece, once.

    python -m benchmarks.fusion_space MODEL.stof.onnx [--jobs 4] [--seconds 60] [--pause FOLDER] [--out FILE]

MODEL is an optimized model without regions. Its times are appended to the table of times (fusion_bench/table.py) that
benchmarks/fusion_search.py replays searches on; what the table has already is not measured again, so a run that was
stopped goes on where it was. Engines of pieces are built by several processes; this one times each as soon as it is
there, and stops the builders meanwhile (benchmarks/pausing.py). They are built in the order of the best choice that
leaves the piece to TensorRT, by estimates: what is missing when time is up matters least.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from stof_onnx.errors import StofError
from stof_onnx.fusion.piece_model import piece_key, piece_model
from stof_onnx.fusion.scheme import Span
from stof_onnx.fusion.search import Measurement
from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.roofline import Roofline
from stof_onnx.fusion.segment import Segment, block_hash
from stof_onnx.fusion.sequence import Block
from stof_onnx.options import EngineWishes
from stof_onnx.trt.region_timer import GpuTimer, engine_us, gpu_timer

from benchmarks.fusion_bench.baselines import exhaustive, possible_pieces, price_of_pieces
from benchmarks.fusion_bench.models import model_blocks
from benchmarks.fusion_bench.table import Table, read_tables
from benchmarks.pausing import Pausing

Built = tuple[bytes, float, str]  # an engine, the seconds that it took, and why there is none
_worker: tuple[list[Block], GpuTimer]


def main() -> None:
    """Measures what the table has not got."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--jobs", type=int, default=4, help="processes that build engines")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no engine is waited for longer")
    parser.add_argument("--pause", type=Path, metavar="FOLDER", help="shared with another run's processes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fusion_space.jsonl"))
    arguments = parser.parse_args()
    begun = time.monotonic()
    blocks = _kinds(arguments.model)
    timer = replace(gpu_timer(EngineWishes(precision=arguments.precision)), programs=None)
    known = read_tables(arguments.out) if arguments.out.exists() else {}
    table = known.get(timer.name, Table(timer.name))
    table.timer, table.file = timer, arguments.out
    order = _order(blocks, table)
    _say(begun, f"{timer.name}: {len(table.times)} times known, {len(order)} pieces to build")
    with contextlib.ExitStack() as stack:
        pausing = Pausing(arguments.pause or Path(stack.enter_context(tempfile.TemporaryDirectory())))
        pausing.install()
        builders = ProcessPoolExecutor(
            arguments.jobs,
            multiprocessing.get_context("spawn"),  # a forked process can not use CUDA
            _open,
            (arguments.model, arguments.precision, pausing),
        )
        built = {builders.submit(_build, number, span): key for key, number, span in order}
        try:
            with pausing.alone():
                _fused(blocks, table)
            _say(begun, f"{len(table.times)} times with all regions")
            for future in _ended(list(built), begun + arguments.seconds):
                _piece(table, built[future], *future.result())
                _say(begun, f"{len(table.times)} times, an engine took {future.result()[1]:.1f} s")
        finally:
            builders.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # nothing more will be asked of them
                process.kill()
    _say(begun, f"{len(_order(blocks, table))} pieces without a time")


def _kinds(model: Path) -> list[Block]:
    """Its distinct blocks."""
    return list({block_hash(block): block for block in model_blocks(model)}.values())


def _fused(blocks: list[Block], table: Table) -> None:
    """Every region in every configuration."""
    for block in blocks:
        for region in BlockSpace(block, Ledger(table)).regions.values():
            for config in table.configs(region):
                table.fused(region, config)


def _order(blocks: list[Block], table: Table) -> list[tuple[str, int, Span]]:
    """The pieces without a time by key, each with a block and a span: those that cost least beyond the best first."""
    wanted: dict[str, tuple[float, int, Span]] = {}
    for number, block in enumerate(blocks):
        estimated = BlockSpace(block, Ledger(Roofline()))
        best, price = exhaustive(estimated)[0], price_of_pieces(estimated)
        for span in possible_pieces(estimated):
            key = piece_key(Segment(block, *span))
            if (key, "") not in table.times:
                wanted[key] = min(wanted.get(key, (math.inf, 0, span)), (price[span] - best, number, span))
    return [(key, number, span) for key, (_, number, span) in sorted(wanted.items(), key=lambda item: item[1])]


def _piece(table: Table, key: str, data: bytes, taken: float, problem: str) -> None:
    start = time.monotonic()
    try:
        us = engine_us(data) if data else math.inf
    except StofError as error:
        us, problem = math.inf, str(error)
    table.keep((key, ""), Measurement(us, taken + time.monotonic() - start, taken, problem))


def _ended(futures: list[Future[Built]], deadline: float) -> Iterator[Future[Built]]:
    """Each when it is done, until all are or the time is up."""
    waiting = set(futures)
    while waiting and time.monotonic() < deadline:
        done, waiting = wait(waiting, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
        yield from done


def _open(model: Path, precision: str, pausing: Pausing) -> None:
    global _worker
    pausing.install()
    _worker = _kinds(model), gpu_timer(EngineWishes(precision=precision))


def _build(number: int, span: Span) -> Built:
    blocks, timer = _worker
    start = time.monotonic()
    try:
        data, problem = timer.build(piece_model(Segment(blocks[number], *span))), ""
    except StofError as error:
        data, problem = b"", str(error)
    return data, time.monotonic() - start, problem


def _say(begun: float, text: str) -> None:
    print(f"[{time.monotonic() - begun:5.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
