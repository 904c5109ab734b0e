"""--shape: names with colons, ranges, and shapes that can not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stof_onnx.errors import StofError
from stof_onnx.options import DimRange, ShapeSpec

sizes = st.lists(st.tuples(*[st.integers(1, 9999)] * 3).map(sorted), min_size=1, max_size=5)
names = st.text(st.sampled_from("ab_/.:0x"), min_size=1).filter(lambda n: n.strip(":"))


@given(name=names, dims=sizes, count=st.integers(1, 3))
def test_every_written_shape_is_read_back(name: str, dims: list[list[int]], count: int) -> None:
    low, opt, high = ("x".join(str(d[i]) for d in dims) for i in range(3))
    text = ":".join([name, *{1: (opt,), 2: (low, high), 3: (low, opt, high)}[count]])
    shape = ShapeSpec.parse(text).resolve({name: len(dims)})
    want = {
        1: tuple(DimRange(o, o, o) for _, o, _ in dims),
        2: tuple(DimRange(lo, hi, hi) for lo, _, hi in dims),
        3: tuple(DimRange(*d) for d in dims),
    }[count]
    assert (shape.name, shape.dims) == (name, want)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ids", "no shape found"),
        ("1x128", "no shape found"),
        ("ids:", "no shape found"),
        (":1x2", "no shape found"),
        ("ids:1xa", "no shape found"),
        ("ids:1x0", "size 0"),
        ("ids:2x8:1x8", "min <= opt <= max"),
        ("ids:-1x8", "no shape found"),
    ],
)
def test_bad_shapes(text: str, message: str) -> None:
    with pytest.raises(StofError, match=message):
        ShapeSpec.parse(text).resolve({"ids": 2})


def test_a_name_that_ends_like_a_shape() -> None:
    spec = ShapeSpec.parse("ids:0:1x128")
    assert spec.resolve({"ids:0": 2}).dims == (DimRange(1, 1, 1), DimRange(128, 128, 128))


def test_two_readings() -> None:
    spec = ShapeSpec.parse("a:1:2:3")
    with pytest.raises(StofError, match="'a:1' and 'a'"):
        spec.resolve({"a": 1, "a:1": 1})
    assert spec.resolve({"a": 1, "a:1": 2}).name == "a"
