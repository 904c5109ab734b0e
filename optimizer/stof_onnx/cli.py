"""Argument parsing only; each command is one function elsewhere."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from stof_onnx import __version__
from stof_onnx.errors import StofError
from stof_onnx.options import EngineWishes, FusionWishes, OptimizeOptions, parse_shapes

if TYPE_CHECKING:
    from stof_onnx.kernels.triton_rows import Program

_MOST_SAMPLES = 1000
_TERMINATED = 128 + signal.SIGTERM
_EXIT_CODES = "exit code: 0 done, 1 the comparison failed, 2 bad input or a problem (one message on stderr)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code. STOF_DEBUG=1 shows tracebacks."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # names of any language, on a terminal of any encoding
    try:
        with _cleaning_up_when_terminated():
            return _dispatch(arguments)
    except StofError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except SystemExit as stop:
        if stop.code != _TERMINATED:  # argparse's
            raise
        return _complain("terminated", _TERMINATED)
    except Exception as error:
        return _complain(f"internal error: {type(error).__name__}: {error}. STOF_DEBUG=1 shows where", 2)


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["export"]:
        return _export(arguments[1:])
    if arguments[:1] == ["bench"]:
        return _bench(_parser().parse_args(arguments))
    if arguments[:1] == ["plugin"]:
        return _plugin(_parser().parse_args(arguments))
    if arguments[:1] == ["kernels"]:
        return _kernels(_parser().parse_args(arguments))
    return _run(_parser().parse_args(arguments))


@contextmanager
def _cleaning_up_when_terminated() -> Iterator[None]:
    """Makes SIGTERM leave through every `finally`, so that no temporary file stays behind."""

    def leave(*_: object) -> None:
        raise SystemExit(_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _complain(message: str, code: int) -> int:
    if os.environ.get("STOF_DEBUG") == "1":
        traceback.print_exc()
    print(f"stof-onnx: {message}", file=sys.stderr)
    return code


def _run(arguments: argparse.Namespace) -> int:
    from stof_onnx import pipeline
    from stof_onnx.progress import Progress
    from stof_onnx.summary import print_report

    options = OptimizeOptions(
        shapes=parse_shapes(arguments.shape),
        assume_no_empty_rows=arguments.assume_no_empty_rows,
        verify=not getattr(arguments, "no_verify", False),
        samples=getattr(arguments, "samples", OptimizeOptions.samples),
        atol=getattr(arguments, "atol", None),
        rtol=getattr(arguments, "rtol", None),
        seed=getattr(arguments, "seed", None),
        load_inputs=getattr(arguments, "load_inputs", None),
        load_outputs=getattr(arguments, "load_outputs", None),
        memory_limit=getattr(arguments, "memory_limit", None),
        pictures=getattr(arguments, "pictures", None),
        report=arguments.report,
        engine=_engine_wishes(arguments),
        fusion=_fusion_wishes(arguments),
    )
    console = Console()
    progress = Progress(Console(stderr=True))
    if arguments.command == "optimize":
        output = arguments.output or arguments.model.with_suffix(".stof.onnx")
        report = pipeline.optimize(arguments.model, output, options, progress)
    elif arguments.command == "inspect":
        report = pipeline.inspect(arguments.model, options, progress)
    else:
        report = pipeline.verify(arguments.model, arguments.optimized, options, progress)
    print_report(report, console)
    if options.report is not None:
        report.write(options.report)
        console.print(f"report: {options.report}", highlight=False, markup=False, soft_wrap=True)
    return 1 if report.failed else 0


def _export(arguments: list[str]) -> int:
    """Hands over to the exporters of `models/`, which need torch and transformers."""
    try:
        return int(import_module("stof_models.cli").main(arguments) or 0)
    except ImportError as error:
        advice = "pip install 'stof-onnx[models]'"
        raise StofError(f"exporting models needs {error.name or error}", "export", advice) from error


def _engine_wishes(arguments: argparse.Namespace) -> EngineWishes:
    if arguments.command != "optimize":
        return EngineWishes(wanted=False)
    return EngineWishes(
        wanted=arguments.engine if isinstance(arguments.engine, bool) or arguments.engine is None else True,
        path=arguments.engine if isinstance(arguments.engine, Path) else None,
        precision=arguments.precision,
        embed=arguments.embed,
        workspace=arguments.workspace,
        timing_cache=arguments.timing_cache,
        emit_lowered=arguments.emit_lowered,
        level=arguments.builder_level,
        half_io=arguments.half_io,
        keep=arguments.keep,
        arch=arguments.arch,
    )


def _fusion_wishes(arguments: argparse.Namespace) -> FusionWishes:
    if arguments.command != "optimize":
        return FusionWishes(tune=False)
    if arguments.tune_budget is not None:
        return FusionWishes(True, arguments.tune_budget, arguments.plan)
    missing = arguments.plan is not None and not arguments.plan.exists()
    return FusionWishes(missing and not arguments.no_tune, plan=arguments.plan)


def _bench(arguments: argparse.Namespace) -> int:
    from stof_onnx import pipeline

    for line in pipeline.bench(arguments.engine, arguments.against, arguments.seed).text():
        print(line)
    return 0


def _plugin(arguments: argparse.Namespace) -> int:
    from stof_onnx.trt import plugin_command

    options = (arguments.tensorrt, arguments.include, arguments.architectures)
    if arguments.action == "build":
        plugin_command.build(*options, Console(), Console(stderr=True))
    elif arguments.action == "path":
        plugin_command.path(*options, Console())
    else:
        plugin_command.info(*options, Console())
    return 0


def _kernels(arguments: argparse.Namespace) -> int:
    from stof_onnx.kernels.triton_command import compile_command

    models = [file for file in arguments.files if file.suffix == ".onnx"]
    dtypes = arguments.dtype or ["fp16"]
    compile_command(
        [file for file in arguments.files if file not in models],
        _programs_of(models, dtypes, arguments),
        arguments.width,
        dtypes,
        arguments.arch or [80, 86, 89, 90],
        arguments.jobs,
        arguments.output,
        Console(),
        Console(stderr=True),
    )
    return 0


def _programs_of(models: list[Path], dtypes: list[str], arguments: argparse.Namespace) -> list[Program]:
    if not models:
        return []
    from stof_onnx import pipeline
    from stof_onnx.progress import Progress

    options = OptimizeOptions(parse_shapes(arguments.shape), arguments.assume_no_empty_rows)
    progress = Progress(Console(stderr=True))
    return [program for model in models for program in pipeline.row_programs(model, options, dtypes, progress)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stof-onnx",
        description="Fast masked attention in deployed ONNX models: finds each masked attention, works out its mask "
        "offline and replaces the pattern by one node that is portable ONNX.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"stof-onnx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "optimize",
        help="replace masked attentions and write the portable ONNX file",
        description="Replaces every attention that is provably equal to a StofAttention node, compares the result with "
        "the original on ONNX Runtime, and writes it. A result that fails the comparison is not written. With nothing "
        "to replace the output is the same model.",
        epilog=_EXIT_CODES,
    )
    command.add_argument("model", type=Path, help="the ONNX model")
    command.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to write (default: MODEL.stof.onnx beside the model)"
    )
    command.add_argument("--no-verify", action="store_true", help="write without comparing")
    _common(command)
    _comparison(command)
    _engine(command)
    _fusion(command)

    command = commands.add_parser(
        "inspect",
        help="show what optimize would do, with a picture of each distinct mask",
        description="Shows every attention, its mask and what stops a replacement. Writes only the pictures and the "
        "report that are asked for.",
        epilog=_EXIT_CODES,
    )
    command.add_argument("model", type=Path, help="the ONNX model")
    command.add_argument("--pictures", type=Path, metavar="DIR", help="also write each distinct mask as PNG to DIR")
    _common(command)

    command = commands.add_parser(
        "verify",
        help="compare an optimized model or an engine with its original on ONNX Runtime",
        description="Runs both models on the same random inputs (padded ones included) and compares every output. An "
        "engine is run with TensorRT at the sizes it was tuned for.",
        epilog=_EXIT_CODES,
    )
    command.add_argument("model", type=Path, help="the original")
    command.add_argument(
        "optimized", type=Path, help="the model, or the engine (.engine, .plan, .trt), to compare with it"
    )
    _common(command)
    _comparison(command)

    command = commands.add_parser(
        "bench",
        help="time an engine with TensorRT",
        description="Times an engine by CUDA-graph replay at the sizes it was tuned for.",
        epilog=_EXIT_CODES,
    )
    command.add_argument("engine", type=Path, help="the engine")
    command.add_argument("--against", type=Path, metavar="FILE", help="another engine, or an ONNX model built plain")
    command.add_argument("--seed", type=_seed, metavar="N", help="of the random inputs")

    _plugin_parser(
        commands.add_parser(
            "plugin",
            help="build or find the TensorRT plugin library",
            description="The plugin library is built once for each TensorRT version and cached (STOF_CACHE_DIR, else "
            "the user's cache folder). STOF_PLUGIN_LIBRARY names one to use instead.",
            epilog=_EXIT_CODES,
        )
    )

    _kernels_parser(
        commands.add_parser(
            "kernels",
            help="compile the kernels of fused regions ahead of time (needs Triton, no GPU)",
            description="Kernels of fused regions are compiled by Triton once and cached (STOF_CACHE_DIR, else the "
            "user's cache folder). The cache's folder `kernels` can be copied to machines without Triton.",
            epilog=_EXIT_CODES,
        )
    )

    commands.add_parser(
        "export", help="export a real architecture with a mask from the zoo (needs torch)", add_help=False
    )
    return parser


def _engine(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("TensorRT engine")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--engine",
        type=_engine_file,
        nargs="?",
        const=True,
        metavar="FILE",
        help="an engine is demanded (and where to write it; default: the output's name with .engine). Without this "
        "option one is built where TensorRT and a GPU are there",
    )
    choice.add_argument("--no-engine", dest="engine", action="store_const", const=False, help="only the ONNX file")
    group.add_argument("--precision", choices=("fp16", "bf16", "fp32"), default="fp16", help="(%(default)s)")
    group.add_argument(
        "--embed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put the plugin library into the engine (default: yes)",
    )
    group.add_argument(
        "--keep", choices=("faster", "stof", "plain"), default="faster", help="which engine is written (%(default)s)"
    )
    group.add_argument("--workspace", type=_size, metavar="BYTES", help="scratch memory a layer may use, e.g. 4G")
    group.add_argument(
        "--builder-level", type=int, choices=range(6), metavar="0-5", help="TensorRT's builder optimization level"
    )
    group.add_argument(
        "--half-io",
        action="store_true",
        help="float32 inputs and outputs of the engine become float16, which spares it a cast at each end",
    )
    group.add_argument("--timing-cache", type=Path, metavar="FILE", help="measured tactics, read and extended")
    group.add_argument(
        "--emit-lowered",
        type=Path,
        metavar="FILE",
        help="also write the model with plugin nodes, for trtexec, polygraphy and ONNX Runtime's TensorRT provider",
    )
    group.add_argument(
        "--arch",
        type=_architecture,
        default=0,
        metavar="SM",
        help="GPU that --emit-lowered is for (default: the local one's, else 90)",
    )


def _fusion(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "fused regions",
        "Operators between attentions become regions where kernels for them are faster than TensorRT's own. Only where "
        "one of these options asks for it.",
    )
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--tune-budget",
        type=_seconds,
        metavar="TIME",
        help="search for so long, as 60s or 5m; engine builds are not counted. Without a GPU, by estimates",
    )
    choice.add_argument("--no-tune", action="store_true", help="no search: regions only from an existing --plan")
    group.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="the regions of an earlier run; without such a file, or with --tune-budget, it is written",
    )


def _plugin_parser(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("build", "build the library unless it is there, and print its path"),
        ("path", "print the library's path; an error where it is not built"),
        ("info", "show the library and what a build uses or misses"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--tensorrt", metavar="VERSION", help="the TensorRT that shall load it (default: the installed one)"
        )
        action.add_argument(
            "--include",
            type=Path,
            metavar="DIR",
            help="TensorRT's headers (default: TENSORRT_INCLUDE_DIR, else searched)",
        )
        action.add_argument(
            "--architectures", default="80;90a", metavar="LIST", help="GPU architectures of the kernels (%(default)s)"
        )


def _kernels_parser(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "compile every configuration of row programs, unless it is cached"
    action = actions.add_parser("compile", help=text, description=text)
    action.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="an .onnx model: what a search on it may ask for; any other file: programs as JSON, one a line",
    )
    _sites(action)
    action.add_argument(
        "--width",
        type=_positive,
        action="append",
        default=[],
        metavar="N",
        help="also norms and activations of rows of N elements (repeat for more)",
    )
    action.add_argument(
        "--dtype",
        choices=("fp16", "bf16", "fp32"),
        action="append",
        help="types of these rows, precisions of the models' engines (default: fp16; repeat for more)",
    )
    action.add_argument(
        "--arch",
        type=_architecture,
        action="append",
        metavar="SM",
        help="GPU architectures (default: 80, 86, 89 and 90; repeat for more)",
    )
    action.add_argument(
        "--jobs", type=_positive, metavar="N", help="compiling processes (default: one a core, at most 8)"
    )
    action.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder of the kernels instead of the cache's")


def _common(command: argparse.ArgumentParser) -> None:
    _sites(command)
    command.add_argument("--report", type=Path, metavar="FILE", help="write the report as JSON")


def _sites(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME:DIMS",
        help="shape of a dynamic input, as 1x128; MIN:MAX or MIN:OPT:MAX give a range (repeat for each input)",
    )
    command.add_argument(
        "--assume-no-empty-rows",
        action="store_true",
        help="run-time padding never hides every key of a query: allows replacements that are otherwise refused",
    )


def _comparison(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("comparison")
    group.add_argument(
        "--samples",
        type=_samples,
        default=OptimizeOptions.samples,
        metavar="N",
        help="random input sets, more with padding (%(default)s)",
    )
    group.add_argument("--seed", type=_seed, metavar="N", help="of the random inputs (default: a fresh one, reported)")
    group.add_argument("--atol", type=_tolerance, metavar="X", help="absolute tolerance instead of the default rule")
    group.add_argument("--rtol", type=_tolerance, metavar="X", help="relative tolerance instead of the default rule")
    group.add_argument("--load-inputs", type=Path, metavar="FILE", help="polygraphy JSON with inputs to compare on")
    group.add_argument(
        "--load-outputs",
        type=Path,
        metavar="FILE",
        help="polygraphy JSON with the original's outputs on --load-inputs (of the leading batch entries at least): "
        "engines are compared with these, and ONNX Runtime need not run the original for them",
    )
    group.add_argument(
        "--memory-limit", type=_size, metavar="BYTES", help="memory to use, e.g. 8G (default: 60%% of what is free)"
    )


def _engine_file(text: str) -> Path:
    """The name of an engine; a model behind --engine would be taken for it."""
    path = Path(text)
    if path.suffix == ".onnx":
        raise argparse.ArgumentTypeError(f"{text} would be the name of the engine. Write the model before --engine")
    return path


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # also of thousands of digits
        raise argparse.ArgumentTypeError(f"not a whole number: {text[:40]}") from None


def _samples(text: str) -> int:
    value = _positive(text)
    if value > _MOST_SAMPLES:
        raise argparse.ArgumentTypeError(f"must be at most {_MOST_SAMPLES}: all input sets are held in memory")
    return value


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be a finite number, at least 0")
    return value


def _seed(text: str) -> int:
    value = _whole(text)
    if not 0 <= value < 1 << 64:
        raise argparse.ArgumentTypeError("must be at least 0, and below 2^64")
    return value


def _architecture(text: str) -> int:
    digits = text.removeprefix("sm_")
    if not digits.isdecimal() or len(digits) > 3 or int(digits) < 80:
        what = f"not an architecture: {text[:40]}. Write compute capability 9.0 as 90; the oldest is 80"
        raise argparse.ArgumentTypeError(what)
    return int(digits)


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    unit = units.get(text[-1:], 0.0)
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"not a time: {text}. Write it as 60s or 5m")
    return value


def _size(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    shift = units.get(text[-1:].upper(), 0)
    try:
        value = float(text[:-1] if shift else text) * (1 << shift)
    except ValueError:
        value = 0.0
    if not 1 <= value < 1 << 60:  # NaN neither
        raise argparse.ArgumentTypeError(f"not a size: {text}. Write it in bytes, or as 512M or 4G")
    return int(value)


if __name__ == "__main__":
    sys.exit(main())
