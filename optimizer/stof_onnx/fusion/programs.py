"""Every program that the search may ask a kernel for: what can be compiled before it runs."""

from __future__ import annotations

from stof_onnx.fusion.search.cost import BlockSpace
from stof_onnx.fusion.search.ledger import Ledger
from stof_onnx.fusion.search.roofline import Roofline, program_of
from stof_onnx.fusion.segment import block_hash
from stof_onnx.fusion.sequence import find_blocks
from stof_onnx.fusion.templates import GEMM_TEMPLATES
from stof_onnx.fusion.tensors import Tensors
from stof_onnx.kernels.triton_rows import Program


def region_programs(tensors: Tensors, precision: str) -> list[Program]:
    """The programs of all possible regions whose kernels are not in the plugin library, each once.

    Args:
        tensors: of a model whose attentions are replaced, with the sizes to tune for.
        precision: of the engine.
    """
    ledger = Ledger(Roofline(precision))
    blocks = {block_hash(block): block for block in find_blocks(tensors)}
    regions = [region for block in blocks.values() for region in BlockSpace(block, ledger).regions.values()]
    wanted = [region for region in regions if region.instance.template not in GEMM_TEMPLATES]
    return list(dict.fromkeys(program_of(region, precision) for region in wanted))
