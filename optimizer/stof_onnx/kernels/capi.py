"""ctypes binding of `libstof_capi.so` (cuda/src/capi.cpp): the kernels as plain function calls on device pointers.

For tests, benchmarks and tuning. Needs the library (`make cuda`), and a GPU only for `forward`.
"""

from __future__ import annotations

import ctypes as ct
import enum
from pathlib import Path

from stof_onnx.errors import StofError

ABI_VERSION = 1
DEFAULT_LIBRARY = Path("build/cuda/libstof_capi.so")
_REBUILD = "Rebuild it from this source tree with `make cuda`"


class DType(enum.IntEnum):
    F16 = 0
    BF16 = 1
    F32 = 2


class BiasKind(enum.IntEnum):
    NONE = 0
    DENSE = 1
    RELATIVE = 2


class KvKind(enum.IntEnum):
    NONE = 0
    MASK = 1
    LENGTH = 2


class MaskedRow(enum.IntEnum):
    ZERO = 0
    MEAN = 1
    SCORES = 2
    NAN = 3


class F32Math(enum.IntEnum):
    FFMA = 0
    TF32X3 = 1
    TF32 = 2


class BitmapOrder(enum.IntEnum):
    TILES = 0
    FRAGMENTS = 1


class Kernel(enum.IntEnum):
    ROW_WISE = 0
    BLOCK_SM80 = 1
    BLOCK_SM90 = 2


class TensorView(ct.Structure):
    """stof::TensorView: a device pointer, strides in elements."""

    _fields_ = [("ptr", ct.c_void_p), ("stride_b", ct.c_int64), ("stride_h", ct.c_int64), ("stride_s", ct.c_int64)]


class MaskView(ct.Structure):
    """stof::MaskView: device pointers to the mask arrays, and their counts."""

    _fields_ = [
        ("full_row_ptr", ct.c_void_p),
        ("full_col_idx", ct.c_void_p),
        ("part_row_ptr", ct.c_void_p),
        ("part_col_idx", ct.c_void_p),
        ("bitmap", ct.c_void_p),
        ("row_order", ct.c_void_p),
        ("mask_index", ct.c_void_p),
        ("index_b", ct.c_int32),
        ("index_h", ct.c_int32),
        ("n_masks", ct.c_int32),
        ("rows", ct.c_int32),
        ("cols", ct.c_int32),
        ("n_full", ct.c_int32),
        ("n_part", ct.c_int32),
        ("tile_m", ct.c_int32),
        ("tile_n", ct.c_int32),
        ("split_rows", ct.c_int32),
        ("bitmap_order", ct.c_int32),
    ]


class AttentionParams(ct.Structure):
    """stof::AttentionParams (cuda/include/stof/attention.h says what each field means)."""

    _fields_ = [
        ("q", TensorView),
        ("k", TensorView),
        ("v", TensorView),
        ("o", TensorView),
        ("batch", ct.c_int32),
        ("heads", ct.c_int32),
        ("kv_heads", ct.c_int32),
        ("seq_q", ct.c_int32),
        ("seq_kv", ct.c_int32),
        ("dim", ct.c_int32),
        ("v_dim", ct.c_int32),
        ("dtype", ct.c_int32),
        ("f32_math", ct.c_int32),
        ("scale", ct.c_float),
        ("softcap", ct.c_float),
        ("mask", MaskView),
        ("bias_kind", ct.c_int32),
        ("bias", ct.c_void_p),
        ("bias_stride_b", ct.c_int64),
        ("bias_stride_h", ct.c_int64),
        ("bias_stride_q", ct.c_int64),
        ("rel_rq", ct.c_int32),
        ("rel_len", ct.c_int32),
        ("kv_kind", ct.c_int32),
        ("kv", ct.c_void_p),
        ("kv_stride", ct.c_int64),
        ("masked_row", ct.c_int32),
        ("kernel", ct.c_int32),
        ("splits", ct.c_int32),
        ("max_row_tiles", ct.c_int32),
        ("workspace", ct.c_void_p),
        ("workspace_bytes", ct.c_size_t),
    ]


def load_library(path: str | Path, entry: str) -> ct.CDLL:
    """Loads libstof_capi.so.

    Args:
        path: of the library.
        entry: a function that it must have.

    Raises:
        StofError: no such file, it does not load, or it lacks `entry`.
    """
    where = str(path)
    if not Path(path).is_file():
        raise StofError("the kernel library is not built", where, "Build it with `make cuda`, or give its path")
    try:
        library = ct.CDLL(str(Path(path).resolve()))
        getattr(library, entry)
    except (OSError, AttributeError) as error:
        raise StofError(f"the kernel library does not load, or is an older one: {error}", where, _REBUILD) from error
    library.stof_error_string.restype = ct.c_char_p
    return library


def check_layout(found: tuple[int, ...], expected: tuple[int, ...], path: str | Path) -> None:
    """Holds the library's version and sizes of its parameters to ours.

    Raises:
        StofError: they differ.
    """
    if found != expected:
        raise StofError(
            f"the kernel library has parameters of (version, bytes) {found}, expected {expected}", str(path), _REBUILD
        )


class KernelLibrary:
    """The loaded library. Functions take `AttentionParams`; pointers in it are device pointers.

    Args:
        path: of libstof_capi.so.

    Raises:
        StofError: no such file, it does not load, or it was built from another version of the parameters.
    """

    def __init__(self, path: str | Path = DEFAULT_LIBRARY) -> None:
        library = load_library(path, "stof_sizeof_attention_params")
        library.stof_sizeof_attention_params.restype = ct.c_size_t
        library.stof_attention_unsupported.restype = ct.c_char_p
        library.stof_attention_workspace_bytes.restype = ct.c_size_t
        library.stof_attention_forward.argtypes = [ct.POINTER(AttentionParams), ct.c_void_p]
        found = library.stof_abi_version(), library.stof_sizeof_attention_params()
        check_layout(found, (ABI_VERSION, ct.sizeof(AttentionParams)), path)
        self._library = library

    def unsupported(self, params: AttentionParams) -> str | None:
        """Why no kernel instance runs `params`, or None when one does."""
        reason: bytes | None = self._library.stof_attention_unsupported(ct.byref(params))
        return None if reason is None else reason.decode()

    def workspace_bytes(self, params: AttentionParams) -> int:
        """Bytes of device memory that `params.workspace` must hold."""
        return int(self._library.stof_attention_workspace_bytes(ct.byref(params)))

    def forward(self, params: AttentionParams, stream: int = 0) -> None:
        """Enqueues the attention on a CUDA stream (a cudaStream_t as an int).

        Raises:
            StofError: what is unsupported, or the CUDA error of the launch.
        """
        error = self._library.stof_attention_forward(ct.byref(params), stream)
        if error:
            reason = self.unsupported(params) or self._library.stof_error_string(error).decode()
            raise StofError(f"attention launch failed: {reason}", "libstof_capi", "Check the parameters and the GPU")
