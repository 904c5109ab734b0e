"""A pair of GEMMs as a region and as TensorRT runs its operators: `python -m benchmarks.gemm_pair_tensorrt`.

An adapter, relu(x w1 + b1) w2 + b2 + x, timed as the search for regions times it (trt/region_timer.py): the region in
its most promising variants, its first product and its second one as two regions, and all its operators as TensorRT's.
Needs TensorRT, the plugin library, and Triton or a cache of compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from stof_onnx.fusion.search import Region
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.sequence import find_blocks
from stof_onnx.fusion.templates import Instance, recognise
from stof_onnx.fusion.tensors import Tensors
from stof_onnx.options import EngineWishes
from stof_onnx.trt.region_timer import GpuTimer, gpu_timer

WIDTH = 768
FIRST = 3  # operators of the adapter with the first product


def adapter(rows: int, hidden: int) -> onnx.ModelProto:
    """The adapter on x[1, rows, WIDTH], in float32."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (WIDTH, hidden), "b1": (hidden,), "w2": (hidden, WIDTH), "b2": (WIDTH,)}
    weights = [
        numpy_helper.from_array((rng.standard_normal(s) * s[0] ** -0.5).astype(np.float32), n)
        for n, s in shapes.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["first"]),
        helper.make_node("Add", ["first", "b1"], ["biased"]),
        helper.make_node("Relu", ["biased"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "w2"], ["second"]),
        helper.make_node("Add", ["second", "b2"], ["changed"]),
        helper.make_node("Add", ["changed", "x"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, rows, WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "adapter", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def best_us(timer: GpuTimer, segment: Segment) -> tuple[float, str]:
    """Microseconds of a segment as one region in its best variant, and that."""
    instance = recognise(segment)
    assert isinstance(instance, Instance), instance
    region = Region(segment, instance)
    return min((timer.fused(region, config).us, config) for config in timer.configs(region))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32768, 4096, 512])
    parser.add_argument("--hidden", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case is begun")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    arguments = parser.parse_args()
    timer, start = gpu_timer(EngineWishes(precision="fp16")), time.time()
    print(timer.name, flush=True)
    for rows in arguments.rows:
        for hidden in arguments.hidden:
            if time.time() - start > arguments.limit:
                print("time is up", flush=True)
                return 1
            model = adapter(rows, hidden)
            tensors = Tensors(model, list(model.graph.initializer), {"x": (1, rows, WIDTH)})
            (block,) = find_blocks(tensors)
            whole = Segment(block, 0, len(block))
            pair, config = best_us(timer, whole)
            two = sum(best_us(timer, Segment(block, *span))[0] for span in ((0, FIRST), (FIRST, len(block))))
            left = timer.left(whole)
            record = {"rows": rows, "hidden": hidden, "config": config, "pair": pair, "two": two, "tensorrt": left.us}
            case = f"[{rows};{WIDTH}->{hidden}->{WIDTH}] {config} {pair:.1f}"
            rest = f"two regions {two:.1f}, TensorRT {left.us:.1f} {left.problem}"
            print(f"{case}, {rest} ({time.time() - start:.0f} s)", flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
