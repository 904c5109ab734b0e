"""What this process holds of the GPU."""

from __future__ import annotations

import os
import subprocess

from stof_onnx.trt import cuda


def device_memory() -> int:
    """Bytes of device memory that this process holds, whatever others do; where the driver lists no processes, all."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    held = dict(line.split(", ") for line in listed if line.count(", ") == 1)
    mine = held.get(str(os.getpid()), "")
    if mine.isdigit():
        return int(mine) << 20
    free, total = cuda.call("cudaMemGetInfo")
    return int(total - free)
