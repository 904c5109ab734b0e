"""Arrays that already lie on the GPU, taken as they are: raw pointers, `__cuda_array_interface__`, DLPack."""

from __future__ import annotations

import ctypes as ct
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from stof_onnx.errors import StofError
from stof_onnx.trt import cuda

_CUDA, _CUDA_MANAGED = 2, 13  # DLDeviceType
_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}  # DLDataTypeCode that numpy has


@dataclass(frozen=True)
class DeviceArray:
    """C-contiguous values on the GPU. `owner` is kept alive as long as this object is.

    A raw pointer is used as `DeviceArray(pointer, shape, dtype)`.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype
    owner: Any = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def device_array(value: Any, name: str, stream: int) -> DeviceArray | None:
    """`value` as it lies on the GPU, ready on `stream`; None where it is in host memory.

    Raises:
        StofError: it is not C-contiguous, or of a type that numpy has not.
    """
    if isinstance(value, DeviceArray):
        return value
    if isinstance(value, np.ndarray):
        return None
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(value, interface, name, stream)
    if hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) in (_CUDA, _CUDA_MANAGED):
        return _from_dlpack(value, name, stream)
    return None


def _from_interface(value: Any, interface: dict[str, Any], name: str, stream: int) -> DeviceArray:
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides is not None and any(s % dtype.itemsize for s in strides):
        raise _not_contiguous(name)
    _check_strides(None if strides is None else tuple(s // dtype.itemsize for s in strides), shape, name)
    producer = interface.get("stream")
    if producer is not None:
        event = cuda.call("cudaEventCreate")
        cuda.call("cudaEventRecord", event, producer)
        cuda.call("cudaStreamWaitEvent", stream, event, 0)
        cuda.call("cudaEventDestroy", event)
    return DeviceArray(int(interface["data"][0] or 0), shape, dtype, value)


class _DLTensor(ct.Structure):
    _fields_ = [
        ("data", ct.c_void_p),
        ("device_type", ct.c_int32),
        ("device_id", ct.c_int32),
        ("ndim", ct.c_int32),
        ("code", ct.c_uint8),
        ("bits", ct.c_uint8),
        ("lanes", ct.c_uint16),
        ("shape", ct.POINTER(ct.c_int64)),
        ("strides", ct.POINTER(ct.c_int64)),
        ("byte_offset", ct.c_uint64),
    ]


_capsule_pointer = ct.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ct.c_void_p, [ct.py_object, ct.c_char_p]


def _from_dlpack(value: Any, name: str, stream: int) -> DeviceArray:
    # The capsule is not consumed: its owner frees it, and lives as long as the result.
    capsule = value.__dlpack__(stream=stream)
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    if tensor.code not in _KINDS or tensor.lanes != 1 or tensor.bits % 8:
        raise StofError(f"'{name}' is of a type that numpy has not", "engine", "Give its pointer as another type")
    dtype = np.dtype(f"{_KINDS[tensor.code]}{tensor.bits // 8}")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    _check_strides(strides, shape, name)
    return DeviceArray(int(tensor.data or 0) + tensor.byte_offset, shape, dtype, (value, capsule))


def _check_strides(strides: tuple[int, ...] | None, shape: tuple[int, ...], name: str) -> None:
    """Raises StofError unless `strides` (in elements; None: C order) are those of C order."""
    if strides is None or 0 in shape:
        return
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise _not_contiguous(name)
        expected *= size


def _not_contiguous(name: str) -> StofError:
    return StofError(f"'{name}' is not C-contiguous", "engine", "Copy it first")
