"""Compiles the row programs that the search may want for a model, for machines without Triton (STOF_CACHE_DIR travels).

python -m benchmarks.fusion_bench.programs MODEL.stof.onnx ... [--precision fp16] [--most 4]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx
from stof_onnx.fusion.search.cost import regions_of
from stof_onnx.fusion.search.roofline import program_of
from stof_onnx.fusion.sequence import find_blocks
from stof_onnx.fusion.templates import GEMM_TEMPLATES
from stof_onnx.fusion.tensors import Tensors
from stof_onnx.kernels.triton_rows import compile_programs, configurations


def main() -> None:
    """Prints how many were compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="optimized models, without regions")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--most", type=int, default=4, help="configurations of each")
    arguments = parser.parse_args()
    items = {}
    for path in arguments.models:
        model = onnx.load(str(path), load_external_data=False)
        for block in find_blocks(Tensors(model, list(model.graph.initializer), base_dir=path.parent)):
            for region in regions_of(block).values():
                if region.instance.template not in GEMM_TEMPLATES:
                    program = program_of(region, arguments.precision)
                    for config in configurations(program)[: arguments.most]:
                        items[program.key, config.name] = (program, config, region.instance.rank)
    compile_programs(list(items.values()), (90,), jobs=2)
    print(f"{len(items)} kernels of {len({key for key, _ in items})} programs")


if __name__ == "__main__":
    main()
