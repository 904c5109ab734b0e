"""The two-stage search for fused regions."""

from stof_onnx.fusion.search.run import SearchOptions, search
from stof_onnx.fusion.search.timer import Measurement, Region, Timer

__all__ = ["Measurement", "Region", "SearchOptions", "Timer", "search"]
