"""Row program + configuration → cubin program: kernels for each architecture, and how to launch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stof_onnx.errors import StofError
from stof_onnx.kernels.cubin_expr import Expr, binary, constant, size
from stof_onnx.kernels.cubin_program import Arg, ArgKind, CubinProgram, KernelImage, Launch, Tensor
from stof_onnx.kernels.triton_rows.build import compile_kernels
from stof_onnx.kernels.triton_rows.cache import KernelCache
from stof_onnx.kernels.triton_rows.configs import RowConfig, configurations
from stof_onnx.kernels.triton_rows.ir import Kind, RowProgram
from stof_onnx.kernels.triton_rows.request import KernelRequest
from stof_onnx.kernels.triton_rows.source import KERNEL, column_blocks, signature, source

_ALIGNMENT = 16  # what Triton specialises pointers on
Item = tuple[RowProgram, RowConfig | None, int]


def compile_program(
    program: RowProgram,
    config: RowConfig | None = None,
    archs: Sequence[int] = (90,),
    rank: int = 2,
    cache: KernelCache | None = None,
) -> CubinProgram:
    """One of `compile_programs`."""
    return compile_programs([(program, config, rank)], archs, cache=cache, jobs=2)[0]


def compile_programs(
    items: Sequence[Item],
    archs: Sequence[int] = (90,),
    jobs: int | None = None,
    cache: KernelCache | None = None,
    fallback: bool = True,
    done: Callable[[int], None] = lambda compiled: None,
) -> list[CubinProgram]:
    """The cubin program of each item, compiled in parallel where the cache has not got it.

    Args:
        items: program, configuration (None: the default one), and the rank of its tensors that have rows: the leading
            axes, of any sizes, are the rows; the last one is the columns.
        archs: architectures the programs shall run on, compute capability times ten.
        jobs, done: as of `compile_kernels`.
        fallback: also kernels for pointers that are not multiples of 16. Without them such pointers are refused at
            launch: for candidates that are only measured.

    Raises:
        StofError: no kernel holds a program's rows; what `compile_kernels` raises.
    """
    if not archs:
        raise StofError("no architecture is named", "kernels")
    archs = sorted(set(archs))
    chosen = [(program, config or configurations(program)[0], rank) for program, config, rank in items]
    each = [kernel_requests(program, config, archs, fallback) for program, config, _ in chosen]
    images = iter(compile_kernels([request for requests in each for request in requests], cache, jobs, done))
    result = []
    for (program, config, rank), requests in zip(chosen, each, strict=True):
        result.append(assemble(program, config, rank, [next(images) for _ in requests], fallback))
    return result


def kernel_requests(
    program: RowProgram, config: RowConfig, archs: Sequence[int], fallback: bool = True
) -> list[KernelRequest]:
    """What has to be compiled: for each architecture the kernel for aligned pointers, then for each the fallback."""
    text, parameters = source(program, config), tuple(signature(program).items())
    return [
        KernelRequest(text, KERNEL, parameters, aligned, config.warps, arch)
        for aligned in ((True, False) if fallback else (True,))
        for arch in archs
    ]


def assemble(
    program: RowProgram, config: RowConfig, rank: int, images: Sequence[KernelImage], fallback: bool = True
) -> CubinProgram:
    """The cubin program of compiled `kernel_requests`."""
    if not 2 <= rank <= 8:
        raise StofError(f"tensors of rank {rank} have no rows of columns: ranks are 2 to 8", "row program")
    first = next(i for i, given in enumerate(program.inputs) if given.kind.per_row)
    leading = [size(first, axis) for axis in range(rank - 1)]
    rows = leading[0]
    for axis in leading[1:]:
        rows = rows * axis
    half = len(images) // 2 if fallback else len(images)
    return CubinProgram(
        inputs=tuple(
            Tensor(given.dtype, _dims(program, given.kind, [None] * (rank - 1) if i == first else leading))
            for i, given in enumerate(program.inputs)
        ),
        outputs=tuple(Tensor(out.dtype, _dims(program, program.kinds[out.value], leading)) for out in program.outputs),
        workspace=constant(0),
        kernels=(tuple(images[:half]), tuple(images[half:])) if fallback else (tuple(images),),
        launches=(
            Launch(
                kernel=0,
                alignment=_ALIGNMENT,
                fallback=1 if fallback else None,
                grid=(rows.ceil_div(config.rows) * column_blocks(program, config), constant(1), constant(1)),
                args=(
                    *(Arg(ArgKind.INPUT, i) for i in range(len(program.inputs))),
                    *(Arg(ArgKind.OUTPUT, i) for i in range(len(program.outputs))),
                    Arg(ArgKind.INT32, _bounded(rows, config)),
                ),
            ),
        ),
    )


def _bounded(rows: Expr, config: RowConfig) -> Expr:
    """`rows`, or a number beyond 32 bits, which is refused, where the index of a thread block's last row is."""
    most = (1 << 31) - config.rows
    return rows + (binary("max", rows, most) - most) * (1 << 32)


def _dims(program: RowProgram, kind: Kind, leading: Sequence[Expr | None]) -> tuple[Expr | None, ...]:
    if kind is Kind.VECTOR:
        return (constant(program.cols),)
    return (*leading, constant(program.cols if kind.per_col else 1))
