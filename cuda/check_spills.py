"""Fails when a hot kernel spills registers or runs its products one by one: `python cuda/check_spills.py [--arch 90a]`.

Compiles the files that hold hot instances for each architecture and reads ptxas' report. General and fp32 instances may
spill a few bytes; those of the files below may not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HOT = {
    "80": ("block_f16.cu", "block_bf16.cu"),
    "90a": ("block_f16.cu", "block_bf16.cu", "attention_sm90*.cu", "fused/*_sm90*.cu"),
}
REPORT = re.compile(
    r"Compiling entry function '(?P<name>\S+)'.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
SERIALISED = re.compile(r"wgmma\.mma_async instructions are serialized.*")


def reports(source: Path, arch: str) -> tuple[list[re.Match[str]], list[str]]:
    """ptxas' report of each kernel in `source`, and its warnings of serialised products."""
    root = Path(__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        command = ["nvcc", "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v", "-cubin"]
        command += ["-I", str(root / "include"), "-I", str(root / "src"), "-o", f"{directory}/out.cubin", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{source.name} does not compile for sm_{arch}:\n{done.stderr}")
    output = done.stderr + done.stdout
    found = list(REPORT.finditer(output))
    if not found:
        sys.exit(f"ptxas reported no kernel in {source.name} for sm_{arch}: has its report changed?")
    return found, SERIALISED.findall(output)


def demangled(name: str) -> str:
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=False).stdout.strip() or name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", choices=sorted(HOT), help="default: all")
    sources = Path(__file__).parent / "src"
    jobs = [
        (path, arch)
        for arch in parser.parse_args().arch or sorted(HOT)
        for pattern in HOT[arch]
        for path in sorted(sources.glob(pattern))
    ]
    spilled = kernels = serialised = 0
    with ThreadPoolExecutor(2) as pool:
        for (path, arch), (found, warnings) in zip(jobs, pool.map(lambda job: reports(*job), jobs), strict=True):
            serialised += len(warnings)
            for warning in warnings:
                print(f"sm_{arch} {path.name}: {warning}")
            for report in found:
                kernels += 1
                if int(report["stores"]) or int(report["loads"]):
                    spilled += 1
                    print(f"sm_{arch} {path.name}: {report['stores']} + {report['loads']} bytes of spills, "
                          f"{report['registers']} registers: {demangled(report['name'])}")  # fmt: skip
    print(f"{kernels} hot kernels, {spilled} with spills, {serialised} with serialised products")
    return 1 if spilled or serialised else 0


if __name__ == "__main__":
    sys.exit(main())
