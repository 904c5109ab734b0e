"""The compiling process: requests come on stdin, a line of JSON each, and get a line each. Needs Triton, no GPU.

A process of its own, since Triton's compiler may abort, and so that compiling is parallel.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from stof_onnx.kernels.cubin_program import KernelImage
from stof_onnx.kernels.triton_rows.request import KernelRequest


def compile_request(request: KernelRequest, folder: Path) -> KernelImage:
    """Compiles one kernel; `folder` takes its source, which Triton reads from a file."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = _load(request, folder)
    pointers = [i for i, (_, kind) in enumerate(request.signature) if kind.startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers} if request.aligned else {}
    source = ASTSource(getattr(module, request.kernel), dict(request.signature), {}, attributes)
    options = {"num_warps": request.warps} | ({"num_stages": request.stages} if request.stages else {})
    compiled = triton.compile(source, GPUTarget("cuda", request.arch, 32), options)
    metadata = compiled.metadata
    if metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0):
        raise ValueError("the kernel needs scratch memory of its own")
    parameters = _count_parameters(compiled.asm["ptx"], metadata.name)
    return KernelImage(
        arch=request.arch,
        name=metadata.name,
        threads=32 * metadata.num_warps,
        shared=metadata.shared,
        hidden=parameters - len(request.signature),
        cubin=compiled.asm["cubin"],
    )


def _count_parameters(ptx: str, kernel: str) -> int:
    entry = re.search(rf"\.entry {re.escape(kernel)}\((.*?)\)\s", ptx, re.DOTALL)
    assert entry, "the kernel is not in its own PTX"
    return entry.group(1).count(".param")


def _load(request: KernelRequest, folder: Path) -> Any:
    path = folder / f"kernel_{request.digest[:16]}.py"
    path.write_text(request.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    # What Triton or its compilers print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder = Path(tempfile.mkdtemp(prefix="stof-triton-"))
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # it would put this folder's name into the kernels
    try:
        for line in sys.stdin:
            try:
                image = compile_request(KernelRequest.from_json(line), folder)
                answer: dict[str, Any] = {**image.__dict__, "cubin": base64.b64encode(image.cubin).decode()}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
