"""A small GEMM and another one behind it in one kernel, whose hidden rows stay on the chip.

`pair.py` says what is computed, `reference.py` computes it in float64, `configs.py` and `source.py` turn it into Triton
source, which `kernels/triton_rows` compiles ahead of time.
"""

from stof_onnx.kernels.gemm_pair.configs import PairConfig, configurations, estimate_us, ranked
from stof_onnx.kernels.gemm_pair.pair import ACTIVATIONS, DTYPES, MOST_HIDDEN, GemmPair

__all__ = ["ACTIVATIONS", "DTYPES", "MOST_HIDDEN", "GemmPair", "PairConfig", "configurations", "estimate_us", "ranked"]
