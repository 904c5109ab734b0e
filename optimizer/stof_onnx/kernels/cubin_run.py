"""Runs a cubin program from Python over cuda-bindings' driver API: for tests and for timing candidates.

What the plugin does in C++ (trt_plugins/src/cubin_region.cpp), with the same checks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from stof_onnx.errors import StofError
from stof_onnx.kernels.cubin_program import ArgKind, CubinProgram, KernelImage, Launch

Shape = Sequence[int]
_POINTERS = (ArgKind.INPUT, ArgKind.OUTPUT, ArgKind.WORKSPACE)


def _driver() -> Any:
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise StofError("cuda-bindings is not installed", "cuda", "pip install 'stof-onnx[gpu]'")


def _call(name: str, *arguments: Any) -> Any:
    status, *values = getattr(_driver(), name)(*arguments)
    if int(status) != 0:
        raise StofError(f"{name} failed: {getattr(status, 'name', status)}", "cuda", "Check the GPU and its driver")
    return values[0] if values else None


def runs_on(arch: int, capability: int) -> bool:
    """Whether machine code for `arch` runs on a GPU of `capability` (both times ten): exactly that, or a later 8.x."""
    return arch == capability or (80 <= arch <= capability < 90)


class LoadedProgram:
    """A program's kernels, loaded into the current context (the device's primary one where none is current).

    Raises:
        StofError: no GPU, or no kernel for it.
    """

    def __init__(self, program: CubinProgram) -> None:
        self.program = program
        self._modules: list[Any] = []
        capability = self._capability()
        self._kernels = [self._load(images, capability) for images in program.kernels]

    def output_shapes(self, shapes: Sequence[Shape]) -> list[tuple[int, ...]]:
        """The shapes of the outputs.

        Raises:
            StofError: the inputs' shapes are not what the program takes.
        """
        if len(shapes) != len(self.program.inputs):
            raise StofError(f"{len(shapes)} inputs instead of {len(self.program.inputs)}", "cubin program")
        for i, (shape, tensor) in enumerate(zip(shapes, self.program.inputs, strict=True)):
            if len(shape) != len(tensor.dims):
                raise StofError(f"input {i} has rank {len(shape)} instead of {len(tensor.dims)}", "cubin program")
        for i, (shape, tensor) in enumerate(zip(shapes, self.program.inputs, strict=True)):
            for axis, (have, dim) in enumerate(zip(shape, tensor.dims, strict=True)):
                if dim is not None and dim.evaluate(shapes) != have:
                    text = f"axis {axis} of input {i} is {have} instead of {dim.evaluate(shapes)}"
                    raise StofError(text, "cubin program")
        return [tuple(dim.evaluate(shapes) for dim in out.dims if dim is not None) for out in self.program.outputs]

    def launch(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        shapes: Sequence[Shape],
        workspace: int = 0,
        stream: int = 0,
    ) -> None:
        """Enqueues the program: device pointers, the inputs' shapes, a CUDA stream's handle. Graphs can capture it.

        Raises:
            StofError: shapes that the program does not take, or a failed launch.
        """
        self.output_shapes(shapes)
        for launch in self.program.launches:
            values, types = self._arguments(launch, inputs, outputs, shapes, workspace)
            pointers = [v for v, arg in zip(values, launch.args, strict=True) if arg.kind in _POINTERS]
            kernel: int | None = launch.kernel
            if any(int(pointer) % launch.alignment for pointer in pointers):
                kernel = launch.fallback
            if kernel is None:
                raise StofError(f"a pointer is not a multiple of {launch.alignment}", "cubin program")
            function, image = self._kernels[kernel]
            grid = [axis.evaluate(shapes) for axis in launch.grid]
            if min(grid) == 0:
                continue
            hidden = image.hidden
            parameters = ((*values, *[0] * hidden), (*types, *[ctypes.c_void_p] * hidden))
            _call("cuLaunchKernel", function, *grid, image.threads, 1, 1, image.shared, stream, parameters, 0)

    def _arguments(
        self, launch: Launch, inputs: Sequence[int], outputs: Sequence[int], shapes: Sequence[Shape], workspace: int
    ) -> tuple[list[int | float], list[Any]]:
        values: list[int | float] = []
        types: list[Any] = []
        for arg in launch.args:
            number = arg.value if isinstance(arg.value, int | float) else arg.value.evaluate(shapes)
            if arg.kind is ArgKind.INPUT:
                number = inputs[int(number)]
            elif arg.kind is ArgKind.OUTPUT:
                number = outputs[int(number)]
            elif arg.kind is ArgKind.WORKSPACE:
                number = workspace + number
            if arg.kind is ArgKind.INT32 and not -(1 << 31) <= number < 1 << 31:
                raise StofError(f"the inputs are too large: {number} does not fit 32 bits", "cubin program")
            values.append(number)
            types.append(_CTYPES[arg.kind])
        return values, types

    def _load(self, images: Sequence[KernelImage], capability: int) -> tuple[Any, KernelImage]:
        fitting = [image for image in images if runs_on(image.arch, capability)]
        if not fitting:
            held = ", ".join(str(image.arch) for image in images)
            raise StofError(f"holds kernels for sm_{held}, none for this GPU (sm_{capability})", "cubin program")
        image = max(fitting, key=lambda image: image.arch)
        module = _call("cuModuleLoadData", image.cubin)
        self._modules.append(module)
        function = _call("cuModuleGetFunction", module, image.name.encode())
        if image.shared > 48 << 10:
            attribute = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call("cuFuncSetAttribute", function, attribute, image.shared)
        return function, image

    def _capability(self) -> int:
        _call("cuInit", 0)
        if not int(_call("cuCtxGetCurrent")):
            _call("cuCtxSetCurrent", _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", 0)))
        device = _call("cuCtxGetDevice")
        attribute = _driver().CUdevice_attribute
        major = _call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = _call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        return 10 * int(major) + int(minor)

    def close(self) -> None:
        """Unloads the kernels; nothing may be running any more."""
        while self._modules:
            _call("cuModuleUnload", self._modules.pop())


_CTYPES = {
    ArgKind.INPUT: ctypes.c_void_p,
    ArgKind.OUTPUT: ctypes.c_void_p,
    ArgKind.WORKSPACE: ctypes.c_void_p,
    ArgKind.INT32: ctypes.c_int32,
    ArgKind.INT64: ctypes.c_int64,
    ArgKind.FLOAT32: ctypes.c_float,
}
