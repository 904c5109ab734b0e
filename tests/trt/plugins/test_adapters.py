"""Both adapters, driven as TensorRT drives them: shapes, formats, attributes, refusals. No GPU."""

from __future__ import annotations

import dataclasses
import random
import secrets
from typing import Any

import pytest

from tests.trt.plugins.host import (
    BF16,
    BOOL,
    CHW2,
    F16,
    F32,
    FIELD_CHAR,
    FIELD_F32,
    FIELD_I32,
    FIELD_I64,
    I8,
    I32,
    LINEAR,
    REFUSED_WORKSPACE,
    Host,
    Node,
    Plugin,
    Tensor,
    assert_refused,
    nodes,
)

NODES = list(nodes())


def create(host: Host, node: Node, **attributes: Any) -> Plugin:
    plugin = host.create(node.attributes() | attributes)
    assert plugin, host.log()
    return plugin


def with_type(node: Node, dtype: int) -> Node:
    return dataclasses.replace(node, dtype=dtype)


def replaced(node: Node, index: int, dims: tuple[int, ...]) -> list[Tensor]:
    tensors = node.tensors()
    tensors[index] = dataclasses.replace(tensors[index], dims=dims)
    return tensors


def test_creator_declares_every_attribute(host: Host) -> None:
    name, version, namespace, *declared = host.describe()
    assert (name, version, namespace) == ("StofAttention", "1", "stof")
    kinds = {field.split(":")[0]: int(field.split(":")[1]) for field in declared}
    for attribute, value in Node(bias_kind="relative", layout="packed", static_seq=True).attributes().items():
        if attribute.startswith("plugin_"):
            continue
        assert kinds[attribute] == {str: FIELD_CHAR, float: FIELD_F32, int: FIELD_I32}[type(value)], attribute


@pytest.mark.parametrize("node", NODES, ids=str)
def test_every_kind_of_node_is_planned(host: Host, node: Node) -> None:
    plugin = create(host, node)
    assert plugin.identity() == "StofAttention 1 stof 1"
    assert plugin.output_shape(node.inputs()) == node.output().dims
    assert plugin.output_type([t.type for t in node.inputs()]) == node.dtype
    workspace = plugin.configure(node.tensors())
    assert host.log() == ""
    if node.splits > 1:  # an output, a maximum and a sum of fp32 for each row and split
        rows = -(-node.seq_q // node.tile[0]) * node.tile[0]
        assert workspace == 4 * node.batch * node.heads * rows * node.splits * (node.v_dim + 2)
    else:
        assert workspace in (0, 256)


@pytest.mark.parametrize("node", NODES, ids=str)
def test_sizes_known_at_run_time_stay_expressions(host: Host, node: Node) -> None:
    plugin = create(host, node)
    dynamic = [dataclasses.replace(t, dims=tuple(-d for d in t.dims)) for t in node.inputs()]
    shape = plugin.output_shape(dynamic)
    assert shape is not None
    assert tuple(map(abs, shape)) == node.output().dims
    assert shape[0] < 0


@pytest.mark.parametrize("node", NODES, ids=str)
def test_formats_of_all_positions(host: Host, node: Node) -> None:
    plugin = create(host, node)
    tensors = node.tensors()
    first_int = 1 if node.layout == "packed" else 3
    ints = set(range(first_int, first_int + 7))
    if node.kv_kind != "none":
        ints.add(first_int + 7 + (node.bias_kind != "none"))
    carrier = len(tensors) - 2 if node.layout == "packed" and not node.static_seq else None
    # Input 0 may have the types that the kernel runs with: what configurePlugin accepts.
    runs = {t for t in (F16, BF16, F32) if 0 <= plugin.configure(with_type(node, t).tensors()) < REFUSED_WORKSPACE}
    assert node.dtype in runs
    assert (F32 in runs) == (node.kernel != "block_sm90")
    for first in sorted(runs):
        for pos in range(len(tensors)):
            for kind in (F32, F16, I8, I32, BOOL, BF16):
                for layout in (LINEAR, CHW2):
                    io = [dataclasses.replace(t, type=first if t.type == node.dtype else t.type) for t in tensors]
                    io[pos] = dataclasses.replace(io[pos], type=kind, format=layout)
                    if pos == 0:
                        wanted = kind in runs
                    elif pos == carrier:
                        wanted = kind in (first, I32)
                    else:
                        wanted = kind == (I32 if pos in ints else first)
                    assert plugin.supports(pos, io) == (wanted and layout == LINEAR), (pos, kind, layout, first)


def test_positions_out_of_range_are_refused(host: Host) -> None:
    node = Node()
    plugin, tensors = create(host, node), node.tensors()
    for pos in (-1, len(tensors), len(tensors) + 5):
        assert not plugin.supports(pos, tensors)
    assert not plugin.supports(0, tensors[:-1])
    assert not plugin.supports(0, [*tensors, tensors[-1]], outputs=2)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"scale": None}, "'scale' is missing"),
        ({"kernel": None}, "'kernel' is missing"),
        ({"scale": float("nan")}, "'scale' is not a finite number"),
        ({"scale": 1}, "'scale' has the wrong type"),
        ({"softcap": -1.0}, "softcap"),
        ({"num_heads": 0}, "'num_heads' is 0"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"layout": "SBHD"}, "'layout' is 'SBHD'"),
        ({"layout": "BHSD,BHSD,BHSD"}, "'layout'"),
        ({"layout": "BHSD,BHSD,BHSD,packed"}, "all of Q, K, V and O"),
        ({"layout": "packed"}, "head_dim"),
        ({"head_dim": 60}, "multiples of 8"),
        ({"tile_m": 60}, "multiples of 8"),
        ({"kernel": "fast"}, "'kernel' is 'fast'"),
        ({"masked_row": ""}, "'masked_row' is empty"),
        ({"bias_kind": "relative"}, "rel_rq"),
        ({"mask_cols": 7}, "mask_cols 7"),
        ({"mask_max_row_tiles": 9}, "mask_max_row_tiles 9"),
        ({"splits": 257}, "'splits' is 257"),
        ({"splits": (FIELD_I32, bytes(8), 2)}, "2 values"),
        ({"splits": (FIELD_I32, b"", 0)}, "'splits' is empty"),
        ({"mask_rows": (FIELD_F32, bytes(4), 1)}, "'mask_rows' has the wrong type"),
    ],
    ids=str,
)
def test_bad_attributes_are_refused_by_name(host: Host, attributes: dict[str, Any], words: str) -> None:
    given = {k: v for k, v in (Node().attributes() | attributes).items() if v is not None}
    assert host.create(given) is None
    assert words in host.log()
    assert host.create(Node().attributes()) is not None


def test_attributes_are_read_whatever_their_order_and_width(host: Host) -> None:
    attributes = Node(bias_kind="relative", splits=3).attributes()
    plugin = host.create(attributes)
    assert plugin
    names = list(attributes)
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    random.Random(seed).shuffle(names)
    shuffled = host.create({name: attributes[name] for name in names})
    assert shuffled and shuffled.serialize() == plugin.serialize()
    # A text may come with its closing NUL, and TensorRT 10 and newer may hand integers over as 64 bits.
    other: dict[str, Any] = {
        k: (FIELD_CHAR, v.encode() + b"\0", len(v) + 1) for k, v in attributes.items() if isinstance(v, str)
    }
    if host.v3:
        other |= {k: (FIELD_I64, v.to_bytes(8, "little"), 1) for k, v in attributes.items() if isinstance(v, int)}
        too_wide = attributes | {"splits": (FIELD_I64, (1 << 32 | 1).to_bytes(8, "little"), 1)}
        assert host.create(too_wide) is None
    again = host.create(attributes | other)
    assert again and again.serialize() == plugin.serialize()


@pytest.mark.parametrize(
    ("node", "index", "dims", "words"),
    [
        (Node(), 0, (2, 3, 100, 64), "Q does not have the shape"),
        (Node(), 0, (2, 4, 100), "Q does not have the shape"),
        (Node(), 1, (2, 4, 130, 64), "K does not have the shape"),
        (Node(), 2, (2, 2, 129, 48), "do not fit together"),
        (Node(), 1, (3, 2, 130, 64), "do not fit together"),
        (Node(), 1, (2, 2, 130, 56), "do not fit together"),
        (Node(), 0, (2, 4, 101, 64), "mask was encoded for 100 x 130"),
        (Node(), 0, (2, 4, 0, 64), "Q does not have the shape"),
        (Node(layout="BSHD", rank=3), 0, (2, 100, 257), "Q does not have the shape"),
        (Node(), 3, (1, 2), "full_row_ptr has 2 entries"),
        (Node(), 4, (2,), "full_col_idx has 2 entries"),
        (Node(), 7, (3, 8, 8, 2), "bitmap has 384 entries"),
        (Node(), 8, (1, 1), "row_order has 1 entries"),
        (Node(), 9, (1,), "mask_index does not have rank 2"),
        (Node(), 9, (3, 1), "mask_index must be"),
        (Node(bias_kind="dense"), 10, (1, 4, 100, 129), "bias is not"),
        (Node(bias_kind="dense"), 10, (1, 3, 100, 130), "bias is not"),
        (Node(bias_kind="relative"), 10, (4, 200), "relative bias is shorter"),
        (Node(kv_kind="mask"), 10, (2, 129), "kv_mask is not"),
        (Node(kv_kind="length"), 10, (1,), "kv_mask is not"),
        (Node(layout="packed"), 0, (200, 479), "packed input is not"),
        (Node(layout="packed"), 8, (2, 99, 8), "with B*S the rows"),
        (Node(layout="packed"), 8, (1, 100, 8), "with B*S the rows"),
        (Node(layout="packed"), 8, (200,), "with B*S the rows"),
        (Node(layout="packed", static_seq=True), 0, (150, 480), "packed input is not"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(
    host: Host, node: Node, index: int, dims: tuple[int, ...], words: str
) -> None:
    plugin = create(host, node)
    assert 0 <= plugin.configure(node.tensors()) < REFUSED_WORKSPACE
    assert_refused(plugin, replaced(node, index, dims), words)


def test_another_number_of_inputs_is_refused(host: Host) -> None:
    node = Node()
    plugin = create(host, node)
    assert_refused(plugin, [*node.inputs()[:-1], node.output()], "9 inputs, 10 expected") if host.v3 else None
    assert plugin.output_shape([]) is None
    assert plugin.output_shape([Tensor((2, 4))] * 10) is None
    if host.v3:
        assert plugin.output_type([F16] * 9) == -1


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (Node(dim=260, v_dim=260), "head sizes"),
        (Node(dim=12, v_dim=12), "head sizes"),
        (Node(kernel="row_wise", splits=2), "row-wise kernel does not split"),
        (Node(tile=(72, 64)), "tile_m = 64 or 128"),
        (Node(tile=(64, 8)), "tile_n = 32, 64 or 128"),
        (Node(kernel="block_sm90", tile=(128, 64), bias_kind="dense"), "Hopper kernel takes no bias"),
        (Node(kernel="block_sm90", tile=(128, 64), dtype=F32), "fp16 and bf16 only"),
        (Node(kernel="block_sm90", tile=(64, 64)), "groups of two bands of 64 rows"),
    ],
    ids=str,
)
def test_what_no_kernel_runs_is_refused_while_building(host: Host, node: Node, words: str) -> None:
    assert_refused(create(host, node), node.tensors(), words)


def test_timing_keys_tell_nodes_apart(host: Host) -> None:
    if not host.v3:
        pytest.skip("IPluginV2 has none")
    keys = {create(host, node).timing_key() for node in NODES}
    configurations = {create(host, node).serialize() for node in NODES}
    assert len(keys) == len(configurations) > 15
    assert create(host, Node()).timing_key() == create(host, Node()).timing_key()
