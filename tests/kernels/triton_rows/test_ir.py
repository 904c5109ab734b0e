"""Programs: built, refused, stored, and what they mean against ONNX's own operators."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from stof_onnx.errors import StofError
from stof_onnx.kernels.triton_rows import (
    Input,
    Kind,
    Op,
    Output,
    RowBuilder,
    RowProgram,
    activation_program,
    cost,
    describe,
    norm_program,
    reference,
)

from tests.kernels.triton_rows.programs import DTYPES, inputs, mixed, named, random_program, rounded


def make(cols: int = 8, inputs: object = None, ops: object = (), outputs: object = None) -> RowProgram:
    given = (Input(Kind.ROWS, "fp16"),) if inputs is None else inputs
    return RowProgram(cols, given, ops, (Output(0, "fp16"),) if outputs is None else outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cols": 0}, "columns are outside"),
        ({"cols": 1 << 17}, "columns are outside"),
        ({"cols": "8"}, "columns are outside"),
        ({"inputs": ()}, "needs an input"),
        ({"inputs": (Input(Kind.VECTOR, "fp16"),)}, "needs an input"),
        ({"inputs": (Input(Kind.ROWS, "fp8"),)}, "knows the types"),
        ({"inputs": (Input(Kind.ROWS, "fp16"), Input(Kind.SCALAR, "fp16"))}, "no scalar inputs"),
        ({"outputs": ()}, "needs an input"),
        ({"outputs": (Output(1, "fp16"),)}, "an output must be"),
        ({"outputs": (Output(-1, "fp16"),)}, "an output must be"),
        ({"ops": (Op("constant", (), 1.0),), "outputs": (Output(1, "fp16"),)}, "an output must be"),
        ({"ops": (Op("neg", (1,)),)}, "does not exist before it"),
        ({"ops": (Op("neg", (-1,)),)}, "does not exist before it"),
        ({"ops": (Op("neg", (0, 0)),)}, "has 2 operands"),
        ({"ops": (Op("tan", (0,)),)}, "unknown operation tan"),
        ({"ops": (Op("constant", (), math.inf),)}, "has the constant inf"),
        ({"ops": (Op("pow", (0,), 9.0),)}, "whole exponents"),
        ({"ops": (Op("pow", (0,), 0.0),)}, "whole exponents"),
        ({"ops": (Op("constant", (), 1.0), Op("row_sum", (1,)))}, "row_sum reduces"),
        ({"ops": (Op("neg", (0,)),) * 257}, "more than 256"),
    ],
)
def test_what_is_no_program_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(StofError, match=message):
        make(**change)  # type: ignore[arg-type]


def test_programs_survive_json() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for program in [*named(96, "bf16").values(), *(random_program(rng) for _ in range(50))]:
        again = RowProgram.from_json(program.to_json())
        assert again == program and again.key == program.key
        assert len(describe(program).splitlines()) == len(program.kinds) + 1


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"cols": 8, "inputs": [["rows"]], "ops": [], "outputs": []}']
)
def test_what_is_no_json_of_a_program_is_refused(text: str) -> None:
    with pytest.raises(StofError, match="no row program"):
        RowProgram.from_json(text)


def test_equal_operations_are_computed_once() -> None:
    b = RowBuilder(8)
    x = b.rows("fp16")
    first, second = b.op("exp", b.add(x, b.constant(1))), b.op("exp", b.add(x, b.constant(1)))
    assert first == second
    b.output(first, "fp16")
    assert len(b.build().ops) == 3


def test_kinds() -> None:
    assert {kind.value for kind in mixed(8, "fp16").kinds} == {"rows", "vector", "column", "scalar"}


def test_cost_counts_each_tensor_once() -> None:
    program = norm_program("layer_norm", 768, "fp16", add=True, keep_sum=True)
    assert cost(program, 1000).bytes == 2 * (4 * 1000 * 768 + 2 * 768)


def onnx_graph(text: str) -> ReferenceEvaluator:
    return ReferenceEvaluator(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}'))


NORM = "agraph (double[r, c] x, double[c] g, double[c] b) => (double[r, c] y)"
ROW = "agraph (double[r, c] x) => (double[r, c] y)"
MODELS: dict[str, tuple[str, Callable[[int, str], RowProgram]]] = {
    "layer norm": (
        f"{NORM} {{ y = LayerNormalization <axis = -1, epsilon = 0.01> (x, g, b) }}",
        lambda cols, dtype: norm_program("layer_norm", cols, dtype, add=False, eps=float(np.float32(0.01))),
    ),
    "gelu": (f"{ROW} {{ y = Gelu (x) }}", lambda cols, dtype: activation_program("gelu_erf", cols, dtype)),
    "gelu tanh": (
        f'{ROW} {{ y = Gelu <approximate = "tanh"> (x) }}',
        lambda cols, dtype: activation_program("gelu_tanh", cols, dtype),
    ),
    "silu": (
        f"{ROW} {{ s = Sigmoid (x) y = Mul (x, s) }}",
        lambda cols, dtype: activation_program("silu", cols, dtype),
    ),
    "rms norm": (
        "agraph (double[r, c] x, double[c] g) => (double[r, c] y) { two = Constant <value = double {2.0}> () "
        "eps = Constant <value = double {0.01}> () axis = Constant <value_ints = [-1]> () square = Pow (x, two) "
        "mean = ReduceMean (square, axis) safe = Add (mean, eps) root = Sqrt (safe) n = Div (x, root) y = Mul (n, g) }",
        lambda cols, dtype: norm_program("rms_norm", cols, dtype, add=False, eps=0.01),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_programs_mean_what_onnx_operators_do(name: str) -> None:
    text, build = MODELS[name]
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    program = build(48, "fp32")
    arrays = [array.astype(np.float64) for array in inputs(program, 5, np.random.default_rng(seed))]
    model = onnx_graph(text)
    wanted = model.run(None, dict(zip(model.input_names, arrays, strict=True)))[0]
    np.testing.assert_allclose(reference(program, arrays)[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_to_nearest_even(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    array = np.random.default_rng(seed).standard_normal(4096).astype(np.float32)
    array[:4] = [1 + 2**-8, 1 + 3 * 2**-8, 0.0, np.inf]  # two ties of bf16
    wanted = torch.from_numpy(array).to(kinds[dtype]).float().numpy()
    np.testing.assert_array_equal(rounded(array, dtype), wanted)
