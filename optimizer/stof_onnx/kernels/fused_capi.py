"""ctypes binding of the fused GEMM regions in `libstof_capi.so` (cuda/include/stof/fused.h says what each field means).

For tests, benchmarks and tuning. Needs the library (`make cuda`), and a GPU only for `launch`.
"""

from __future__ import annotations

import ctypes as ct
import enum
from dataclasses import dataclass
from pathlib import Path

from stof_onnx.errors import StofError
from stof_onnx.kernels.capi import DEFAULT_LIBRARY, check_layout, load_library

ABI_VERSION = 4
AUTO_CONFIG, CUBLASLT_CONFIG = -1, -2


class Template(enum.IntEnum):
    GEMM_EPILOGUE = 0
    GATED_MLP = 1
    GEMM_NORM = 2


class Norm(enum.IntEnum):
    LAYER = 0
    RMS = 1


class Activation(enum.IntEnum):
    NONE = 0
    RELU = 1
    GELU_ERF = 2
    GELU_TANH = 3
    SILU = 4


class FusedParams(ct.Structure):
    """stof::FusedParams: device pointers, row strides in elements."""

    _fields_ = [
        ("template_id", ct.c_int32),
        ("config", ct.c_int32),
        ("dtype", ct.c_int32),
        ("activation", ct.c_int32),
        ("m", ct.c_int32),
        ("n", ct.c_int32),
        ("k", ct.c_int32),
        ("reserved", ct.c_int32),
        ("a", ct.c_void_p),
        ("b", ct.c_void_p),
        ("b2", ct.c_void_p),
        ("bias", ct.c_void_p),
        ("bias2", ct.c_void_p),
        ("residual", ct.c_void_p),
        ("out", ct.c_void_p),
        ("stride_a", ct.c_int64),
        ("stride_b", ct.c_int64),
        ("stride_b2", ct.c_int64),
        ("stride_residual", ct.c_int64),
        ("stride_out", ct.c_int64),
        ("workspace", ct.c_void_p),
        ("workspace_bytes", ct.c_size_t),
        ("rotation", ct.c_void_p),
        ("rotated_columns", ct.c_int32),
        ("head_dim", ct.c_int32),
        ("positions", ct.c_int32),
        ("reserved2", ct.c_int32),
        ("scale", ct.c_void_p),
        ("shift", ct.c_void_p),
        ("sum", ct.c_void_p),
        ("stride_sum", ct.c_int64),
        ("norm", ct.c_int32),
        ("epsilon", ct.c_float),
    ]


class _FusedConfig(ct.Structure):
    _fields_ = [
        ("name", ct.c_char * 32),
        ("tile_m", ct.c_int32),
        ("tile_n", ct.c_int32),
        ("tile_k", ct.c_int32),
        ("stages", ct.c_int32),
        ("cluster_m", ct.c_int32),
        ("cluster_n", ct.c_int32),
        ("arch", ct.c_int32),
    ]


@dataclass(frozen=True)
class Config:
    """One compiled variant of a template (stof::FusedConfig)."""

    name: str
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    cluster_m: int
    cluster_n: int
    arch: int


class FusedLibrary:
    """The loaded library. Functions take `FusedParams`; pointers in it are device pointers.

    Args:
        path: of libstof_capi.so.

    Raises:
        StofError: no such file, it does not load, or it was built from another version of the parameters.
    """

    def __init__(self, path: str | Path = DEFAULT_LIBRARY) -> None:
        library = load_library(path, "stof_sizeof_fused_params")
        for size in (library.stof_sizeof_fused_params, library.stof_sizeof_fused_config):
            size.restype = ct.c_size_t
        library.stof_fused_config.restype = ct.POINTER(_FusedConfig)
        library.stof_fused_unsupported.restype = library.stof_cublaslt_problem.restype = ct.c_char_p
        library.stof_fused_workspace_bytes.restype = ct.c_size_t
        library.stof_fused_launch.argtypes = [ct.POINTER(FusedParams), ct.c_void_p]
        found = (
            library.stof_fused_abi_version(),
            library.stof_sizeof_fused_params(),
            library.stof_sizeof_fused_config(),
        )
        check_layout(found, (ABI_VERSION, ct.sizeof(FusedParams), ct.sizeof(_FusedConfig)), path)
        self._library = library

    def configs(self, template: Template) -> list[Config]:
        """The variants in this build, by index; none where it was built without their architecture."""
        count = self._library.stof_fused_config_count(int(template))
        return [self._config(template, i) for i in range(count)]

    def _config(self, template: Template, index: int) -> Config:
        c = self._library.stof_fused_config(int(template), index).contents
        return Config(c.name.decode(), c.tile_m, c.tile_n, c.tile_k, c.stages, c.cluster_m, c.cluster_n, c.arch)

    def auto_config(self, params: FusedParams, sms: int) -> int:
        """Index of the variant that AUTO_CONFIG stands for on a GPU of `sms` multiprocessors; -1: there is none."""
        return int(self._library.stof_fused_auto_config(ct.byref(params), sms))

    def unsupported(self, params: FusedParams) -> str | None:
        """Why no variant runs `params`, or None when one does."""
        reason: bytes | None = self._library.stof_fused_unsupported(ct.byref(params))
        return None if reason is None else reason.decode()

    def cublaslt_problem(self) -> str | None:
        """Why CUBLASLT_CONFIG can not run on this machine, or None when it can."""
        reason: bytes | None = self._library.stof_cublaslt_problem()
        return None if reason is None else reason.decode()

    def workspace_bytes(self, params: FusedParams) -> int:
        """Bytes of device memory that `params.workspace` must hold."""
        return int(self._library.stof_fused_workspace_bytes(ct.byref(params)))

    def launch(self, params: FusedParams, stream: int = 0) -> None:
        """Enqueues the region on a CUDA stream (a cudaStream_t as an int).

        Raises:
            StofError: what is unsupported, or the CUDA error of the launch.
        """
        error = self._library.stof_fused_launch(ct.byref(params), stream)
        if error:
            reason = self.unsupported(params) or self._library.stof_error_string(error).decode()
            raise StofError(f"fused region launch failed: {reason}", "libstof_capi", "Check the parameters and the GPU")
