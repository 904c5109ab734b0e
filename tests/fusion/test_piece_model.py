"""Pieces as models of their own: the same function on flattened rows, in the engine's type, weights at random."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from stof_onnx.fusion.piece_model import piece_key, piece_model, random_array
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import Block, find_blocks

from tests.fusion.graphs import GraphBuilder, gelu_erf, tensors_of
from tests.fusion.synthetic import layer_block


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


def block_of(b: GraphBuilder, *outputs: str, opset: int = 17) -> Block:
    model = b.model(*outputs, opset=opset)
    sizes = {name: tuple(int(s) for s in shape) for name, shape in b.inputs.items()}
    (block,) = find_blocks(tensors_of(model, sizes))
    return block


def with_weights(piece: onnx.ModelProto, original: onnx.ModelProto) -> onnx.ModelProto:
    """The piece with the original's weights, in its own type and shape."""
    known = {t.name: numpy_helper.to_array(t) for t in original.graph.initializer}
    for tensor in piece.graph.initializer:
        if tensor.name not in known:  # an axis
            continue
        mine = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(known[tensor.name].reshape(mine.shape).astype(mine.dtype), tensor.name))
    return piece


@pytest.mark.parametrize("opset", [17, 18])
def test_rows_are_flat_and_the_function_is_the_same(opset: int) -> None:
    b = GraphBuilder(np.random.default_rng(opset))
    x, r = b.input("x", 2, 6, 16), b.input("r", 2, 6, 16)
    rows = b.op("Reshape", x, b.const([-1, 16], np.int64))
    y = b.op("Reshape", b.op("Gemm", rows, b.weight(16, 16), b.vector(16)), b.const([2, 6, 16], np.int64))
    y = b.op("Add", gelu_erf(b, y, 1), r)
    if opset >= 18:
        mean = b.op("ReduceMean", y, b.const([2], np.int64), keepdims=1)
    else:
        mean = b.op("ReduceMean", y, axes=[2], keepdims=1)
    y = b.op("Sub", y, mean)
    y = b.op("LayerNormalization", y, b.vector(16), b.vector(16), axis=2)
    y = b.op("Mul", b.const(np.ones((1, 1, 16)) * 0.5), b.op("Cast", y, to=onnx.TensorProto.FLOAT))
    block = block_of(b, y, opset=opset)
    piece = piece_model(Segment(block, 0, len(block)))
    assert [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in piece.graph.input] == [[12, 16], [12, 16]]
    assert "Reshape" not in {n.op_type for n in piece.graph.node}
    feeds = b.feeds()
    original = b.model(y, opset=opset)
    (want,) = run(original, feeds)
    (got,) = run(with_weights(piece, original), {n: a.reshape(12, 16) for n, a in feeds.items()})
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start, stop", [(0, 4), (3, 4), (4, 11), (5, 8), (11, 15), (0, 15)])
def test_pieces_of_a_layer(start: int, stop: int) -> None:
    """Every piece loads and runs in the model's type, and its numbers stay in fp16's range: engines compute in that."""
    piece = piece_model(Segment(layer_block(), start, stop))
    rng = np.random.default_rng(0)
    feeds = {}
    for value in piece.graph.input:
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        feeds[value.name] = random_array(tuple(d.dim_value for d in value.type.tensor_type.shape.dim), np.float32, rng)
    for output in run(piece, feeds):
        assert output.dtype == np.float32 and np.abs(output).max() < 1e3 and output.std() > 0


def test_other_operators_keep_their_shapes() -> None:
    """An embedding ahead of a norm: indices stay integers, ranks stay."""
    b = GraphBuilder(np.random.default_rng(0))
    table, ids = b.weight(10, 16), b.input("ids", 2, 6)
    y = b.op("LayerNormalization", b.op("Gather", table, ids), b.vector(16), axis=-1)
    model = b.model()
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    model.graph.output.append(onnx.helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, [2, 6, 16]))
    (block,) = find_blocks(tensors_of(model, {"ids": (2, 6)}))
    piece = piece_model(Segment(block, 0, 2))
    (value,) = piece.graph.input
    assert value.type.tensor_type.elem_type == onnx.TensorProto.INT64
    (got,) = run(piece, {"ids": np.zeros((2, 6), np.int64)})
    assert got.shape == (2, 6, 16) and got.dtype == np.float32


def test_random_arrays_repeat_a_block() -> None:
    array = random_array((3, 1 << 16), np.float16, np.random.default_rng(0))
    assert array.shape == (3, 1 << 16) and abs(float(array.astype(np.float32).std()) - 1) < 0.02
    assert np.array_equal(array[0], array[1])


def test_keys_see_sizes_and_structure_and_no_names() -> None:
    """Layers of one model, of another, and of another split of the same rows share their times; other sizes do not."""
    keys = {
        piece_key(Segment(block, *at)) for block, at in ((layer_block(), (4, 11)), (layer_block(layers=2), (19, 26)))
    }
    assert len(keys) == 1

    def norm(shape: tuple[int, ...], epsilon: float = 1e-3) -> str:
        b = GraphBuilder(np.random.default_rng(0))
        y = b.op(
            "LayerNormalization", b.op("Relu", b.input("x", *shape)), b.vector(shape[-1]), axis=-1, epsilon=epsilon
        )
        return piece_key(Segment(block_of(b, y), 0, 2))

    assert norm((2, 6, 16)) == norm((3, 4, 16)) == norm((12, 16)) == norm((12, 16), 1e-5)
    assert len({norm((2, 6, 16)), norm((2, 8, 16)), norm((2, 6, 32))}) == 3
