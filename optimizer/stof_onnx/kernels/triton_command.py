"""`stof-onnx kernels compile`: kernels compiled ahead of time, into a cache that other machines can use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from stof_onnx.errors import StofError
from stof_onnx.files import read_source
from stof_onnx.kernels.triton_rows.build import compile_kernels
from stof_onnx.kernels.triton_rows.cache import KernelCache
from stof_onnx.kernels.triton_rows.compile import kernel_requests
from stof_onnx.kernels.triton_rows.ir import RowProgram
from stof_onnx.kernels.triton_rows.library import standard_programs
from stof_onnx.kernels.triton_rows.programs import Program, configurations


def compile_command(
    files: Sequence[Path],
    given: Sequence[Program],
    widths: Sequence[int],
    dtypes: Sequence[str],
    archs: Sequence[int],
    jobs: int | None,
    output: Path | None,
    console: Console,
    progress: Console,
) -> None:
    """Compiles every configuration of programs, unless the cache has it, and prints what there is now.

    Args:
        files: row programs as JSON (RowProgram.to_json), one or more lines a file.
        given: more programs.
        widths, dtypes: also the standard programs at these row widths, in these types.
        archs: GPU architectures, compute capability times ten.
        jobs: compiling processes (default: one a core, at most 8).
        output: the cache's folder (default: `kernels` in the cache folder).

    Raises:
        StofError: a file holds no programs, nothing is asked for, or a kernel does not compile.
    """
    programs: list[Program] = [*(program for file in files for program in _read(file)), *given]
    programs += [p for cols in widths for dtype in dtypes for p in standard_programs(cols, dtype).values()]
    if not programs:
        raise StofError(
            "nothing to compile", "kernels compile", "Name a model with regions, a file of programs, or a --width"
        )
    requests = [
        request
        for program in dict.fromkeys(programs)
        for config in configurations(program)
        for request in kernel_requests(program, config, archs)
    ]
    cache = KernelCache(output)
    missing = sum(cache.get(request) is None for request in dict.fromkeys(requests))
    columns = ("compiling kernels", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress, disable=not progress.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=missing)
        compile_kernels(requests, cache, jobs, lambda compiled: bar.update(task, completed=compiled))
    total = len(dict.fromkeys(requests))
    text = f"{total} kernels of {len(dict.fromkeys(programs))} programs, {missing} of them compiled now: {cache.folder}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _read(file: Path) -> list[RowProgram]:
    lines = read_source(file).decode(errors="replace").splitlines()
    try:
        return [RowProgram.from_json(line) for line in lines if line.strip()]
    except StofError as error:
        raise StofError(error.what, str(file), "Write one program a line (RowProgram.to_json)") from error
