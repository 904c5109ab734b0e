"""Program + configuration → cubin program: kernels for each architecture, and how to launch them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stof_onnx.errors import StofError
from stof_onnx.kernels.cubin_expr import Expr, binary, constant, size
from stof_onnx.kernels.cubin_program import Arg, ArgKind, CubinProgram, KernelImage, Launch, Tensor
from stof_onnx.kernels.gemm_pair import GemmPair, PairConfig
from stof_onnx.kernels.gemm_pair import source as pair_source
from stof_onnx.kernels.triton_rows.build import compile_kernels
from stof_onnx.kernels.triton_rows.cache import KernelCache
from stof_onnx.kernels.triton_rows.configs import RowConfig
from stof_onnx.kernels.triton_rows.ir import Kind, RowProgram
from stof_onnx.kernels.triton_rows.programs import Config, Program, configurations
from stof_onnx.kernels.triton_rows.request import KernelRequest
from stof_onnx.kernels.triton_rows.source import KERNEL, column_blocks, signature, source

_ALIGNMENT = 16  # what Triton specialises pointers on
Item = tuple[Program, Config | None, int]


def compile_program(
    program: Program,
    config: Config | None = None,
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
    program: Program, config: Config, archs: Sequence[int], fallback: bool = True
) -> list[KernelRequest]:
    """What has to be compiled: for each architecture the kernel for aligned pointers, then for each the fallback."""
    if isinstance(program, GemmPair):
        assert isinstance(config, PairConfig)
        text, name, stages = pair_source.source(program, config), pair_source.KERNEL, config.stages
        parameters = tuple(pair_source.signature(program).items())
    else:
        assert isinstance(config, RowConfig)
        text, name, stages, parameters = source(program, config), KERNEL, None, tuple(signature(program).items())
    return [
        KernelRequest(text, name, parameters, aligned, config.warps, arch, stages)
        for aligned in ((True, False) if fallback else (True,))
        for arch in archs
    ]


def assemble(
    program: Program, config: Config, rank: int, images: Sequence[KernelImage], fallback: bool = True
) -> CubinProgram:
    """The cubin program of compiled `kernel_requests`."""
    if not 2 <= rank <= 8:
        raise StofError(f"tensors of rank {rank} have no rows of columns: ranks are 2 to 8", "row program")
    if isinstance(program, GemmPair):
        assert isinstance(config, PairConfig)
        return _assemble_pair(program, config, rank, images, fallback)
    assert isinstance(config, RowConfig)
    first = next(i for i, given in enumerate(program.inputs) if given.kind.per_row)
    leading = [size(first, axis) for axis in range(rank - 1)]
    inputs = (
        Tensor(given.dtype, _dims(program, given.kind, [None] * (rank - 1) if i == first else leading))
        for i, given in enumerate(program.inputs)
    )
    outputs = (Tensor(out.dtype, _dims(program, program.kinds[out.value], leading)) for out in program.outputs)
    return _packed(inputs, outputs, leading, config.rows, column_blocks(program, config), images, fallback)


def _assemble_pair(
    pair: GemmPair, config: PairConfig, rank: int, images: Sequence[KernelImage], fallback: bool
) -> CubinProgram:
    leading = [size(0, axis) for axis in range(rank - 1)]
    before: dict[str, list[Expr | None]] = {"x": [None] * (rank - 1), "residual": [*leading]}
    inputs = (
        Tensor(pair.dtype, (*before.get(name, ()), *(constant(n) for n in sizes)))
        for name, sizes in pair.inputs.items()
    )
    outputs = (Tensor(pair.dtype, (*leading, constant(pair.width))),)
    return _packed(inputs, outputs, leading, config.rows, config.parts, images, fallback)


def _packed(
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    leading: Sequence[Expr],
    block_rows: int,
    blocks: int,
    images: Sequence[KernelImage],
    fallback: bool,
) -> CubinProgram:
    """One launch of a kernel of inputs, outputs and `rows`, of which `blocks` thread blocks share `block_rows`."""
    rows = leading[0]
    for axis in leading[1:]:
        rows = rows * axis
    half = len(images) // 2 if fallback else len(images)
    taken, made = tuple(inputs), tuple(outputs)
    return CubinProgram(
        inputs=taken,
        outputs=made,
        workspace=constant(0),
        kernels=(tuple(images[:half]), tuple(images[half:])) if fallback else (tuple(images),),
        launches=(
            Launch(
                kernel=0,
                alignment=_ALIGNMENT,
                fallback=1 if fallback else None,
                grid=(rows.ceil_div(block_rows) * blocks, constant(1), constant(1)),
                args=(
                    *(Arg(ArgKind.INPUT, i) for i in range(len(taken))),
                    *(Arg(ArgKind.OUTPUT, i) for i in range(len(made))),
                    Arg(ArgKind.INT32, _bounded(rows, block_rows)),
                ),
            ),
        ),
    )


def _bounded(rows: Expr, block_rows: int) -> Expr:
    """`rows`, or a number beyond 32 bits, which is refused, where the index of a thread block's last row is."""
    most = (1 << 31) - block_rows
    return rows + (binary("max", rows, most) - most) * (1 << 32)


def _dims(program: RowProgram, kind: Kind, leading: Sequence[Expr | None]) -> tuple[Expr | None, ...]:
    if kind is Kind.VECTOR:
        return (constant(program.cols),)
    return (*leading, constant(program.cols if kind.per_col else 1))
