"""docs/mask_format.md: its example and its C++ reader are checked as they stand there."""

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stof_onnx.kernels.fragments import fragment_words
from stof_onnx.mask import ONNX_INPUTS, EncodedMask, encode

from tests.mask.dense_masks import matrices, tables

DOCUMENT = (Path(__file__).parents[2] / "docs" / "mask_format.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    return text


def example() -> np.ndarray:
    q, k = np.arange(20)[:, None], np.arange(28)[None, :]
    causal, all_but_query_5 = k <= q, (q != 5) & (k >= 0)
    return np.stack([causal, all_but_query_5, causal])[None]


def test_example():
    written = json.loads(block("json"))
    mask = encode(example(), written["tile_m"], written["tile_n"])
    sizes = {name: written[name] for name in ("s_q", "s_kv", "tile_m", "tile_n")}
    arrays = {name: np.array(written[name], np.int32) for name in ONNX_INPUTS if name != "bitmap"}
    arrays["bitmap"] = np.vectorize(lambda word: int(word, 16), otypes=[np.uint64])(written["bitmap"])
    read = EncodedMask(**arrays, **sizes)
    read.validate()
    assert read == mask
    pair = re.search(r"pair \[(\d+), −(\d+)\]", DOCUMENT)
    assert mask.to_onnx_arrays()["bitmap"][0, 0, 0].tolist() == [int(pair[1]), -int(pair[2])]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("reader")
    wrappers = """
extern "C" void read_all(const Mask* mask, int b, int h, uint8_t* out) {
  for (int q = 0; q < mask->s_q; ++q)
    for (int k = 0; k < mask->s_kv; ++k) out[int64_t(q) * mask->s_kv + k] = allowed(*mask, b, h, q, k);
}
extern "C" void read_tile(const uint32_t* fragments, int tile_m, int tile_n, int p, uint8_t* out) {
  for (int r = 0; r < tile_m; ++r)
    for (int c = 0; c < tile_n; ++c) out[r * tile_n + c] = allowed_in_fragments(fragments, tile_m, tile_n, p, r, c);
}
"""
    (folder / "reader.cpp").write_text(block("cpp") + wrappers)
    library = folder / "reader.so"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(folder / "reader.cpp")], check=True)
    return ctypes.CDLL(str(library))


class CMask(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ONNX_INPUTS if name != "row_order"),
        *((name, ctypes.c_int32) for name in ("index_b", "index_h", "s_q", "s_kv", "tile_m", "tile_n")),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables(), st.sampled_from([8, 16, 64]), st.sampled_from([8, 64, 72]))
def test_cpp_reader(reader, table, tile_m, tile_n):
    mask = encode(table, tile_m, tile_n)
    arrays = [getattr(mask, name).ctypes.data for name in ONNX_INPUTS if name != "row_order"]
    c_mask = CMask(*arrays, *mask.mask_index.shape, mask.s_q, mask.s_kv, tile_m, tile_n)
    for b, h in np.ndindex(*table.shape[:2]):
        out = np.full(table.shape[2:], 7, np.uint8)
        reader.read_all(ctypes.byref(c_mask), b, h, out.ctypes.data_as(ctypes.c_void_p))
        assert (out == table[b, h]).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(matrices(), st.sampled_from([16, 64, 80]), st.sampled_from([64, 128]))
def test_cpp_reader_of_fragments(reader, allowed, tile_m, tile_n):
    mask = encode(allowed, tile_m, tile_n)
    padded = np.zeros((mask.rows * tile_m, mask.cols * tile_n), bool)
    padded[: mask.s_q, : mask.s_kv] = allowed
    words = fragment_words(mask.bitmap)
    tile_rows = np.repeat(np.arange(mask.rows), np.diff(mask.part_row_ptr[0]))
    for p in range(mask.n_part):
        out = np.full((tile_m, tile_n), 7, np.uint8)
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (words, out)]
        reader.read_tile(pointers[0], tile_m, tile_n, p, pointers[1])
        top, left = tile_rows[p] * tile_m, mask.part_col_idx[p] * tile_n
        assert (out == padded[top : top + tile_m, left : left + tile_n]).all()
