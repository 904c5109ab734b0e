"""The command's own search, and what the engines of its plans take.

    python -m benchmarks.fusion_plans FOLDER/gpt2-causal-16x2048x2.onnx ... [--jobs 4] [--again] [--pause FOLDER]

Each model, of `benchmarks.real_models export` or an encoder (MASK:BxS), is searched as `stof-onnx optimize
--tune-budget` does, several side by side: builds overlap, a timing stops the others (benchmarks.pausing). A search is
interrupted after `--wall` seconds, as by Ctrl-C. Then three engines without a plain one are built and timed with the
GPU to themselves: attentions only, the plan of the search's initial scheme, the plan that was searched. A JSON line a
search goes to `--out`:

    date, commit, model, B, S, layers, timer, samples, builds, cached, complete, seconds, build_seconds (of the plan),
    search_s (of the whole command's search), again_s and again_samples (with `--again`: of a second run, from the plan
    cache), regions (of each kind of block: [template, operators, configuration, fused_us, left_us, kept, reason, how
    often in the model]), blocks ([hash, scheme, count, left_us, planned_us])

and one for its engines: model, B, S, attention_ms, initial_ms, searched_ms, burst_ms (attention_ms and searched_ms of
the first 20 ms after a pause), err_attention, err_searched (relative, of the first batch entry).
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import tempfile
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from stof_onnx import pipeline
from stof_onnx.fusion.plan import read_plan
from stof_onnx.options import EngineWishes, FusionWishes, OptimizeOptions
from stof_onnx.progress import Progress
from stof_onnx.trt import choose, turns
from stof_onnx.trt.availability import load_plugins
from stof_onnx.trt.session import EngineSession

from benchmarks.fusion_columns import Sitting, Subject, builder, hidden, options_of, prepare
from benchmarks.pausing import Pausing

_LAST_S = 20.0  # of the budget, for the last timings
_WISHES = OptimizeOptions(verify=False, engine=EngineWishes(wanted=False))


def initial_of(subject: Subject) -> Subject:
    """The same model with its own files: the plan is that of the initial scheme."""
    return replace(subject, work=str(Path(subject.work) / "initial"))


def prepare_both(subject: Subject) -> str:
    """Writes the model, and its optimized file with the initial plan. Sees no GPU."""
    initial = initial_of(subject)
    Path(initial.work).mkdir(exist_ok=True)
    if not subject.exported:  # else both have one file
        subject.write()
    return prepare(initial)


def searched(subject: Subject, prepared: str, budget: float, wall: float, again: bool) -> dict[str, Any]:
    """Searches, writes plan and optimized file; the line without what is known of the model. In a builder's process."""
    search_s = _search(subject, budget, wall)
    plan = read_plan(subject.plan)
    names = ("timer", "samples", "builds", "cached", "complete", "seconds", "build_seconds")
    line = {name: getattr(plan, name) for name in names} | {"search_s": round(search_s, 2)}
    line["regions"] = [
        [r.template, "+".join(r.operators), r.config, _us(r.fused_us), _us(r.left_us), r.kept, r.reason, block.count]
        for block in plan.blocks.values()
        for r in block.regions
    ]
    line["blocks"] = [[b.hash, b.bits, b.count, _us(b.left_us), _us(b.planned_us)] for b in plan.blocks.values()]
    if again:
        line["again_s"] = round(_search(subject, budget, wall), 2)
        line["again_samples"] = read_plan(subject.plan).samples
    return line


def applied(subject: Subject, plan: Path) -> dict[str, Any]:
    """Writes the optimized file by a plan of another run. Sees no GPU; there is no line."""
    subject.plan.write_bytes(plan.read_bytes())
    pipeline.optimize(
        subject.source, subject.portable, replace(_WISHES, fusion=FusionWishes(plan=subject.plan)), Progress()
    )
    return {}


def _known(subject: Subject, folder: Path | None) -> Path | None:
    path = folder / f"{subject.name}.plan.json" if folder else None
    return path if path is not None and path.is_file() else None


def _search(subject: Subject, budget: float, wall: float) -> float:
    """Seconds of the command."""
    begun, search = time.monotonic(), FusionWishes(tune=True, budget=budget, plan=subject.plan)
    subject.plan.unlink(missing_ok=True)
    alarm = threading.Timer(wall, _thread.interrupt_main)
    alarm.daemon = True
    alarm.start()
    try:
        pipeline.optimize(subject.source, subject.portable, replace(_WISHES, fusion=search), Progress())
    except KeyboardInterrupt:  # the search was over, its plan is written
        plan = FusionWishes(plan=subject.plan)
        pipeline.optimize(subject.source, subject.portable, replace(_WISHES, fusion=plan), Progress())
    finally:
        alarm.cancel()
    return time.monotonic() - begun


def _us(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def build(subject: Subject, regions: bool) -> choose.Candidate:
    """An engine of the optimized file. In a builder's process."""
    with turns.building():
        return choose.build_stof(subject.portable, options_of(subject), regions=regions)


def timed(
    subject: Subject, attention: choose.Candidate, initial: choose.Candidate, found: choose.Candidate, expected: Any
) -> dict[str, Any]:
    """The line of the engines."""
    options, feeds = options_of(subject), subject.feeds()
    assert options.plugins is not None
    load_plugins(options.plugins)  # the engines were built in other processes
    race = choose.Race(choose.Candidate("plain", problem="not built"), attention, fused=found)
    choose.settle(race, subject.portable, options, [feeds], expected)
    times = {"attention": attention.timing, "searched": found.timing}
    line: dict[str, Any] = {f"{name}_ms": t and round(t.median, 4) for name, t in times.items()}
    line["initial_ms"] = _session_ms(initial, feeds, 2.0, 0.0)
    line["burst_ms"] = [_session_ms(candidate, feeds, 0.02, 0.5) for candidate in (attention, found)]
    errors = {"attention": attention.error, "searched": found.error}
    line |= {f"err_{name}": error and error.relative for name, error in errors.items()}
    return line | {"problems": [c.problem for c in (attention, initial, found) if c.problem]}


def _session_ms(candidate: choose.Candidate, feeds: dict[str, Any], seconds: float, pause: float) -> float | None:
    if candidate.engine is None:
        return None
    session = EngineSession(candidate.engine.data)
    try:
        with turns.alone():
            time.sleep(pause)
            return round(session.time(feeds, seconds=seconds).median, 4)
    finally:
        session.close()


def main() -> None:
    """Runs the models; every line is written at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MASK:BxS|MODEL.onnx")
    parser.add_argument("--jobs", type=int, default=4, help="models that are searched side by side")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="of measuring, a search")
    parser.add_argument("--wall", type=float, default=1e6, metavar="SECONDS", help="a search is interrupted then")
    parser.add_argument("--deadline", type=float, default=1e9, metavar="SECONDS", help="nothing is waited for longer")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="MODEL.plan.json in it is not searched again")
    parser.add_argument("--again", action="store_true", help="a second search, from the plan cache")
    parser.add_argument("--pause", type=Path, metavar="FOLDER", help="shared with another run's processes")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--commit", default=os.environ.get("STOF_COMMIT", ""))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fusion_plans.jsonl"))
    arguments = parser.parse_args()
    begun, context = time.monotonic(), multiprocessing.get_context("spawn")  # a forked process can not use CUDA

    def write(subject: Subject, line: dict[str, Any]) -> None:
        model, _, spec = subject.facts()
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about = {"date": now, "commit": arguments.commit, "model": model, "B": spec.batch, "S": spec.seq}
        text = json.dumps(about | {"layers": spec.layers} | line)
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", flush=True)
        with arguments.out.open("a") as file:
            file.write(text + "\n")

    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        pausing = Pausing(arguments.pause or Path(work) / "processes")
        pausing.install()
        builders = ProcessPoolExecutor(arguments.jobs, context, builder, (pausing,))
        helpers = stack.enter_context(ProcessPoolExecutor(4, context, hidden))
        stack.callback(_end, builders)
        subjects = [Subject(text, work, arguments.seed) for text in arguments.models]
        written = {subject: helpers.submit(prepare_both, subject) for subject in subjects}
        limits, references = (arguments.budget, arguments.wall, arguments.again), {}
        searches: dict[Subject, Future[dict[str, Any]]] = {}
        for subject in subjects:
            prepared, plan = written[subject].result(), _known(subject, arguments.plans)
            searches[subject] = (
                helpers.submit(applied, subject, plan)
                if plan
                else builders.submit(searched, subject, prepared, *limits)
            )
            references[subject] = helpers.submit(_expected, subject)
        engines: dict[Subject, list[Future[choose.Candidate]]] = {}
        deadline = begun + arguments.deadline
        while (searches or engines) and time.monotonic() < deadline - _LAST_S:
            for subject in [subject for subject, search in searches.items() if search.done()]:
                search = searches.pop(subject)
                if Sitting.worked(subject, search):
                    if search.result():
                        write(subject, search.result())
                    wanted = ((initial_of(subject), True), (subject, True), (subject, False))
                    engines[subject] = [builders.submit(build, one, regions) for one, regions in wanted]
            built = [subject for subject, made in engines.items() if all(engine.done() for engine in made)]
            for subject in built[:1]:  # then what has been searched meanwhile
                made = engines.pop(subject)
                if all(Sitting.worked(subject, engine) for engine in made):
                    initial, found, attention = (engine.result() for engine in made)
                    write(subject, timed(subject, attention, initial, found, references[subject].result()))
            time.sleep(0.1)
        for subject in (*searches, *engines):
            print(f"{subject.name}: out of time", flush=True)


def _expected(subject: Subject) -> list[dict[str, Any]]:
    return [subject.expected()]


def _end(builders: ProcessPoolExecutor) -> None:
    builders.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():  # nothing more will be asked of them
        process.kill()


if __name__ == "__main__":
    main()
