"""Time and peak memory of `stof-onnx optimize --no-verify`: a 1.3-billion-parameter GPT, and BERT-base at S = 1024.

    python -m benchmarks.optimize [--dtype fp32] [--folder DIR] [gpt] [bert]

Each run is a fresh process; its peak is the kernel's own count (ru_maxrss), which leaves the page cache out. The limits
are those the project promises: 90 s and 1.6 times the file size for the GPT, 15 s for BERT-base.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LIMITS = {"gpt": (90.0, 1.6), "bert": (15.0, None)}
_GPT = {"layers": 24, "hidden": 2048, "heads": 32, "vocab": 50257, "seq": 2048}
_CHILD = """
import json, resource, sys, time
from stof_onnx.cli import main
start = time.perf_counter()
code = main(["optimize", sys.argv[1], "-o", sys.argv[2], "--no-verify", "--report", sys.argv[3]])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("RESULT " + json.dumps({"code": code, "seconds": time.perf_counter() - start, "peak": peak}))
"""


def main() -> int:
    """Prints one line for each case; exit code 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(LIMITS)} (default: all)")
    parser.add_argument("--dtype", choices=("fp16", "fp32"), default="fp32", help="of the GPT's weights")
    parser.add_argument("--folder", help="where the models go (default: a temporary folder)")
    arguments = parser.parse_args()
    unknown = set(arguments.cases) - set(LIMITS)
    if unknown:
        parser.error(f"unknown case: {', '.join(sorted(unknown))}")
    failed = False
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for case in arguments.cases or LIMITS:
            source = Path(folder) / f"{case}.onnx"
            if case == "gpt":
                write_gpt(source, np.float16 if arguments.dtype == "fp16" else np.float32)
            else:
                _export_bert(source)
            failed |= not _run(case, source, Path(folder))
    return int(failed)


def _run(case: str, source: Path, folder: Path) -> bool:
    target, report = folder / f"{case}.stof.onnx", folder / f"{case}.json"
    command = [sys.executable, "-c", _CHILD, str(source), str(target), str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        print(f"{case}: failed\n{done.stdout}{done.stderr}")
        return False
    result = json.loads(line.removeprefix("RESULT "))
    attention = json.loads(report.read_text())["attention"]
    size = sum(f.stat().st_size for f in folder.glob(f"{case}.onnx*"))
    seconds, share = LIMITS[case]
    ratio = result["peak"] / size
    good = result["code"] == 0 and result["seconds"] <= seconds and (share is None or ratio <= share)
    print(
        f"{case}: {result['seconds']:.1f} s (limit {seconds:g}), peak {result['peak'] / 2**20:.0f} MiB = "
        f"{ratio:.2f} x file of {size / 2**20:.0f} MiB (limit {share or 'none'}), "
        f"{attention['replaced']} of {attention['found']} replaced, {'ok' if good else 'MISSED'}",
        flush=True,
    )
    for file in folder.glob(f"{case}.*"):
        file.unlink()
    return good


def _export_bert(path: Path) -> None:
    size = ["--layers", "12", "--hidden", "768", "--heads", "12", "--vocab", "30522", "--seq", "1024", "--batch", "1"]
    command = [sys.executable, "-m", "stof_models.cli", "bert", "--mask", "bigbird", *size, "-o", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_gpt(path: Path, dtype: type, **sizes: int) -> None:
    """Writes a GPT-2-style decoder as exporters write it, weights streamed into `<path>.data`.

    Args:
        dtype: np.float16 or np.float32.
        sizes: layers, hidden, heads, vocab, seq where they differ from the 1.3-billion-parameter ones.
    """
    size = _GPT | sizes
    start = time.perf_counter()
    graph = _Gpt(size["hidden"], size["heads"], size["seq"], dtype)
    graph.build(size["layers"], size["vocab"])
    rng = np.random.default_rng(0)
    data = path.with_name(path.name + ".data")
    block = (rng.standard_normal(1 << 20) * 0.02).astype(dtype)
    with data.open("wb") as file:
        for tensor, count in graph.external():
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", data.name), ("offset", file.tell()), ("length", count * block.itemsize)):
                tensor.external_data.add(key=key, value=str(value))
            for first in range(0, count, block.size):
                file.write(block[: min(block.size, count - first)].tobytes())
    onnx_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "gpt",
            [helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, size["seq"]])],
            [helper.make_tensor_value_info("logits", onnx_type, [1, size["seq"], size["vocab"]])],
            graph.tensors,
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path.write_bytes(model.SerializeToString())
    parameters = sum(count for _, count in graph.external())
    print(f"wrote {parameters / 1e9:.2f} billion parameters in {time.perf_counter() - start:.0f} s", file=sys.stderr)


class _Gpt:
    def __init__(self, hidden: int, heads: int, seq: int, dtype: type) -> None:
        self.hidden, self.heads, self.seq = hidden, heads, seq
        self.dtype = np.dtype(dtype)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self._large: list[tuple[onnx.TensorProto, int]] = []

    def external(self) -> Iterator[tuple[onnx.TensorProto, int]]:
        """Tensors without data yet, and their element counts."""
        yield from self._large

    def build(self, layers: int, vocab: int) -> None:
        x = self.op("Gather", self.weight("wte", vocab, self.hidden), "input_ids")
        x = self.op("Add", x, self.weight("wpe", self.seq, self.hidden))
        allowed = self.value("causal", np.tril(np.ones((1, 1, self.seq, self.seq), bool)))
        lowest = self.value("lowest", np.finfo(self.dtype).min.reshape(()))
        for i in range(layers):
            x = self.op("Add", x, self.attention(f"h.{i}.attn", self.norm(f"h.{i}.ln_1", x), allowed, lowest))
            x = self.op("Add", x, self.mlp(f"h.{i}.mlp", self.norm(f"h.{i}.ln_2", x)))
        self.op("MatMul", self.norm("ln_f", x), self.weight("lm_head", self.hidden, vocab), output="logits")

    def attention(self, name: str, x: str, allowed: str, lowest: str) -> str:
        head = self.hidden // self.heads
        qkv = self.linear(f"{name}.c_attn", x, self.hidden, 3 * self.hidden)
        sizes = self.value(f"{name}.split", np.full(3, self.hidden, np.int64))
        parts = [f"{name}.{p}" for p in "qkv"]
        self.nodes.append(helper.make_node("Split", [qkv, sizes], parts, name=f"{name}/Split", axis=-1))
        shape = self.value(f"{name}.shape", np.array([1, self.seq, self.heads, head], np.int64))
        q, k, v = (
            self.op("Transpose", self.op("Reshape", part, shape), perm=perm)
            for part, perm in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        root = self.value(f"{name}.root", np.array(head**0.5, self.dtype))
        scores = self.op("Div", self.op("MatMul", q, k), root)
        weights = self.op("Softmax", self.op("Where", allowed, scores, lowest), axis=-1)
        out = self.op("Transpose", self.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        flat = self.value(f"{name}.flat", np.array([1, self.seq, self.hidden], np.int64))
        return self.linear(f"{name}.c_proj", self.op("Reshape", out, flat), self.hidden, self.hidden)

    def mlp(self, name: str, x: str) -> str:
        x = self.linear(f"{name}.c_fc", x, self.hidden, 4 * self.hidden)
        half, one = (self.value(f"{name}.{v}", np.array(v, self.dtype)) for v in (0.5, 1.0))
        inner = self.op("Mul", x, self.value(f"{name}.root", np.array(0.7978845608, self.dtype)))
        gate = self.op("Add", self.op("Tanh", inner), one)
        return self.linear(
            f"{name}.c_proj", self.op("Mul", self.op("Mul", x, half), gate), 4 * self.hidden, self.hidden
        )

    def norm(self, name: str, x: str) -> str:
        scale, bias = (self.value(f"{name}.{v}", np.full(self.hidden, v, self.dtype)) for v in (1, 0))
        return self.op("LayerNormalization", x, scale, bias, axis=-1)

    def linear(self, name: str, x: str, rows: int, cols: int) -> str:
        product = self.op("MatMul", x, self.weight(f"{name}.weight", rows, cols))
        return self.op("Add", product, self.value(f"{name}.bias", np.zeros(cols, self.dtype)))

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: object) -> str:
        name = f"/{kind}_{len(self.nodes)}"
        output = output or f"{name}_output_0"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=name, **attributes))
        return output

    def value(self, name: str, array: np.ndarray) -> str:
        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, rows: int, cols: int) -> str:
        onnx_type = helper.np_dtype_to_tensor_dtype(self.dtype)
        self.tensors.append(TensorProto(name=name, data_type=onnx_type, dims=[rows, cols]))
        self._large.append((self.tensors[-1], rows * cols))
        return name


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    sys.exit(main())
