"""Runs an engine that stof-onnx wrote, with TensorRT and cuda-bindings and nothing of stof-onnx or pycuda.

python run_engine.py model.stof.engine x=x.npy          # writes each output to NAME.npy
python run_engine.py model.stof.engine --plugins libstof_plugins.so x=x.npy    # an engine built with --no-embed
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import tensorrt as trt

try:
    from cuda.bindings import runtime as cudart
except ImportError:
    from cuda import cudart


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of the CUDA runtime returned beside its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(status)
    return values[0] if values else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("--plugins")
    parser.add_argument("inputs", nargs="*", metavar="NAME=FILE.npy")
    arguments = parser.parse_intermixed_args()  # inputs may stand behind --plugins

    runtime = trt.Runtime(trt.Logger())
    runtime.engine_host_code_allowed = True  # the engine carries the plugins' code
    if arguments.plugins:
        trt.get_plugin_registry().load_library(arguments.plugins)
    with open(arguments.engine, "rb") as file:
        engine = runtime.deserialize_cuda_engine(file.read())
    if engine is None:
        raise SystemExit("the engine does not load")
    context = engine.create_execution_context()
    stream = checked(cudart.cudaStreamCreate())

    given = {name: np.load(path) for name, _, path in (text.partition("=") for text in arguments.inputs)}
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
    if set(given) != set(inputs):
        raise SystemExit(f"the engine's inputs are {', '.join(inputs)}: give each as NAME=FILE.npy")
    outputs = {}
    for name in [*inputs, *(n for n in names if n not in inputs)]:  # output shapes follow from input shapes
        dtype = trt.nptype(engine.get_tensor_dtype(name))
        if name in inputs:
            array = np.ascontiguousarray(given[name], dtype)
            if not context.set_input_shape(name, array.shape):
                raise SystemExit(f"wrong shape of {name}")
        else:
            array = outputs[name] = np.empty(tuple(context.get_tensor_shape(name)), dtype)
        pointer = checked(cudart.cudaMalloc(array.nbytes))
        if name in inputs:
            kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
            checked(cudart.cudaMemcpy(pointer, array.ctypes.data, array.nbytes, kind))
        context.set_tensor_address(name, int(pointer))
    if not context.execute_async_v3(int(stream)):
        raise SystemExit("the inference failed")
    checked(cudart.cudaStreamSynchronize(stream))
    for name, array in outputs.items():
        pointer = context.get_tensor_address(name)
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        checked(cudart.cudaMemcpy(array.ctypes.data, pointer, array.nbytes, kind))
        np.save(f"{name}.npy", array)
        print(f"{name}: {array.shape} written to {name}.npy")


if __name__ == "__main__":
    main()
