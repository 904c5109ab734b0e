"""The parser of cubin programs under AddressSanitizer and UBSan: what is packed arrives, damaged bytes do no harm."""

from __future__ import annotations

import random
import secrets
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from stof_onnx.errors import StofError
from stof_onnx.kernels.cubin_expr import BINARY, Expr, binary, constant, size
from stof_onnx.kernels.cubin_program import Arg, ArgKind, CubinProgram, KernelImage, Launch, Tensor, fnv1a

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "trt_plugins" / "src"
INTERESTING = (0, 1, 2, 3, 8, 15, 16, 63, 64, 255, 256, 1024, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFC, 0xFFFFFFFF)


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path_factory.mktemp("fuzz") / "cubin_fuzz"
    options = [
        "-std=c++17",
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-Wall",
        "-Wextra",
    ]
    sources = [str(HERE / "cubin_fuzz.cpp"), str(SOURCES / "cubin_program.cpp")]
    subprocess.run([compiler, *options, f"-I{SOURCES}", *sources, "-o", str(program)], check=True)
    return program


def parse(parser: Path, programs: Sequence[bytes]) -> list[str]:
    """The parser's line for each program."""
    data = b"".join(struct.pack("<I", len(program)) + program for program in programs)
    run = subprocess.run([str(parser)], input=data, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()[-2000:]
    lines = run.stdout.decode().splitlines()
    assert len(lines) == len(programs)
    return lines


def elf(payload: int = 40) -> bytes:
    """The smallest file that has the frame of a cubin: a header, names, code, a table of three sections."""
    names = b"\0.shstrtab\0.text.k\0"
    code = bytes(payload)
    table = 64 + len(names) + len(code)
    header = (
        b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, table, 0x5A, 64, 56, 0, 64, 3, 1)
    )
    sections = [
        struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, 64, len(names), 0, 0, 1, 0),
        struct.pack("<IIQQQQIIQQ", 11, 1, 0, 0, 64 + len(names), len(code), 0, 0, 1, 0),
    ]
    return header + names + code + b"".join(sections)


def image(arch: int = 90, name: str = "stof_rows", cubin: bytes | None = None) -> KernelImage:
    return KernelImage(arch, name, 128, 1024, 2, elf() if cubin is None else cubin)


def sample(workspace: Expr | None = None, images: Sequence[KernelImage] | None = None) -> CubinProgram:
    """A program that uses everything the format has."""
    rows = size(0, 0) * size(0, 1)
    arguments = (
        Arg(ArgKind.INPUT, 0), Arg(ArgKind.INPUT, 1), Arg(ArgKind.OUTPUT, 1), Arg(ArgKind.OUTPUT, 0),
        Arg(ArgKind.WORKSPACE, constant(8)), Arg(ArgKind.INT32, rows), Arg(ArgKind.INT64, rows * 768),
        Arg(ArgKind.FLOAT32, 0.5),
    )  # fmt: skip
    grid = (binary("max", rows.ceil_div(4) - 1, binary("min", rows // 2, 7)), constant(1), constant(2))
    return CubinProgram(
        inputs=(Tensor("fp16", (None, None, constant(768))), Tensor("bf16", (constant(768),)), Tensor("int32", ())),
        outputs=(Tensor("fp32", (size(0, 0), size(0, 1) + 1)), Tensor("fp16", (rows, constant(768)))),
        workspace=rows * 4 if workspace is None else workspace,
        kernels=(tuple(images or (image(80), image(90))), (image(80), image(90))),
        launches=(Launch(0, 16, 1, grid, arguments), Launch(1, 1, None, grid, arguments[:1])),
    )


def forged(data: bytes) -> bytes:
    """`data` with the length and checksum that it needs."""
    return data[:8] + struct.pack("<2I", len(data), fnv1a(data[16:])) + data[16:]


def test_what_is_packed_arrives(parser: Path) -> None:
    assert parse(parser, [sample().pack()])[0].startswith("3 2 2 : ")


def test_both_sides_evaluate_alike(parser: Path) -> None:
    """Values of random expressions; the parser prints them in the packed order, the last one being the whole."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    expressions: list[Expr] = []
    for _ in range(300):
        pool = [size(0, 0), size(0, 1), constant(rng.randint(-5, 40)), constant(rng.getrandbits(rng.randint(1, 62)))]
        for _ in range(rng.randint(1, 12)):
            pool.append(Expr(rng.choice(list(BINARY)), rng.choice(pool), rng.choice(pool)))
        expressions.append(pool[-1])
    lines = parse(parser, [sample(workspace=expression).pack() for expression in expressions])
    agreed = 0
    for expression, line in zip(expressions, lines, strict=True):
        values = line.split(" : ")[1].split(" ")
        try:
            wanted = expression.evaluate([(1, 2, 3), (4,), ()])
        except StofError:
            assert values == ["overflow"]
            continue
        if values == ["overflow"]:
            assert any(abs(value) >= 1 << 63 for value in intermediate(expression))
        else:
            assert str(wanted) in values
            agreed += 1
    assert agreed > 100


def intermediate(expression: Expr) -> list[int]:
    """The values of an expression's parts."""
    values = [expression.evaluate([(1, 2, 3), (4,), ()])]
    for part in (expression.left, expression.right):
        if isinstance(part, Expr):
            values += intermediate(part)
    return values


def test_every_truncation_and_extension_is_refused(parser: Path) -> None:
    good = sample().pack()
    cut = [good[:n] for n in range(len(good))] + [good + bytes(4)]
    honest = [forged(data) for data in cut if len(data) >= 16]
    for line in parse(parser, cut + honest):
        assert line.startswith("refused: "), line


def test_every_flipped_bit_is_refused(parser: Path) -> None:
    good = sample().pack()
    flipped = []
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        flipped.append(bytes(data))
    for bit, line in enumerate(parse(parser, flipped)):
        assert line.startswith("refused: "), bit


def test_forged_programs_do_no_harm(parser: Path) -> None:
    """Words changed under a right checksum: refused, or a program whose every index leads somewhere."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    good = sample().pack()
    programs = []
    for _ in range(20000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            word = rng.choice([*INTERESTING, rng.getrandbits(32), rng.getrandbits(6)])
            struct.pack_into("<I", data, 4 * rng.randrange(4, len(data) // 4), word)
        programs.append(forged(bytes(data)))
    lines = parse(parser, programs)
    refused = sum(line.startswith("refused: ") for line in lines)
    assert 0.3 < refused / len(lines) < 0.999


def test_random_bytes_are_refused(parser: Path) -> None:
    lengths = (0, 1, 15, 16, 17, 64, 1000)
    for line in parse(
        parser, [secrets.token_bytes(n) for n in lengths] + [forged(secrets.token_bytes(n + 16)) for n in lengths]
    ):
        assert line.startswith("refused: ")


@pytest.mark.parametrize(
    ("offset", "kind", "value"),
    [
        (0, "B", 0x7E), (4, "B", 1), (5, "B", 2), (18, "H", 62), (40, "Q", 1 << 62), (40, "Q", 400), (58, "H", 63),
        (60, "H", 0), (60, "H", 0xFFFF), (62, "H", 3), (54, "H", 1), (56, "H", 9), (32, "Q", 1 << 63),
    ],
)  # fmt: skip
def test_cubins_whose_headers_lead_outside_are_refused(parser: Path, offset: int, kind: str, value: int) -> None:
    data = bytearray(elf())
    if offset in (54, 32):
        struct.pack_into("<H", data, 56, 1)  # one segment, so that the field counts
    struct.pack_into(f"<{kind}", data, offset, value)
    line = parse(parser, [sample(images=[image(cubin=bytes(data))]).pack()])[0]
    assert line == "refused: kernel 0 of the program is no whole cubin"


@pytest.mark.parametrize("field", [0, 24, 32])
def test_cubins_whose_sections_lead_outside_are_refused(parser: Path, field: int) -> None:
    data = bytearray(elf())
    at = len(data) - 64 + field  # name, offset and size of the last section
    struct.pack_into("<I" if field == 0 else "<Q", data, at, 1 << 31)
    line = parse(parser, [sample(images=[image(cubin=bytes(data))]).pack()])[0]
    assert line == "refused: kernel 0 of the program is no whole cubin"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (sample(images=[image(name="")]), "unusable description"),
        (sample(images=[image(name="two words")]), "unusable description"),
        (sample(images=[image(name="n" * 256)]), "unusable description"),
        (sample(images=[image(arch=10)]), "unusable description"),
        (sample(images=[KernelImage(90, "k", 100, 0, 0, elf())]), "unusable description"),
        (sample(images=[KernelImage(90, "k", 128, 0, 9, elf())]), "a number is too large"),
        (sample(images=[KernelImage(90, "k", 2048, 0, 0, elf())]), "a number is too large"),
        (sample(images=[image(cubin=b"")]), "no whole cubin"),
        (sample(workspace=size(0, 3)), "reads axis 3 of input 0"),
        (sample(workspace=size(9, 0)), "reads axis 0 of input 9"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(parser: Path, program: CubinProgram, message: str) -> None:
    assert message in parse(parser, [program.pack()])[0]


def test_real_kernels_pass(parser: Path) -> None:
    from stof_onnx.kernels.triton_rows import compile_program, norm_program
    from stof_onnx.kernels.triton_rows.cache import triton_version

    if triton_version() is None:
        pytest.skip("needs triton")
    for cols in (64, 768):
        cubin = compile_program(
            norm_program("layer_norm", cols, "fp16", add=True, keep_sum=True), archs=(80, 90), rank=3
        )
        assert parse(parser, [cubin.pack()])[0].startswith("4 2 1 : ")
