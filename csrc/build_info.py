"""What the extension module was built from: `hash` prints it, `write` records it next to the module.

Standard library only: it runs inside CMake, before the package is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
SOURCES = (
    "CMakeLists.txt", "*.cmake", "*.py", "bindings/*", "cpu/*.*", "cpu/simd/*", "include/moeopt/*", "launch/*",
)  # fmt: skip
DEVICE_SOURCES = {
    "cpu": ("CMakeLists.txt", "cpu/*.*", "cpu/simd/*", "include/moeopt/*.h"),
    "cuda": ("cuda.cmake", "compile_cuda.py", "include/moeopt/*", "launch/*"),
}
"""What the kernels for one device are made of: measured speeds hold as long as it stays."""
CPU_OPS = ("fused_experts", "flash_dmoe", "int4_experts", "sparse_experts", "paged_attention")
CUDA_OPS = ("fused_experts", "flash_dmoe", "gate_topk", "skinny_gemm")


def source_hash(compiler: str, cuda_archs: str) -> str:
    """Return a hash of everything the module depends on: sources, compilers, CUDA architectures, Python ABI."""
    digest = _digest(SOURCES, SOURCE_DIR)
    digest.update(f"{compiler_version(compiler)}\0{nvcc_version()}\0{cuda_archs}\0".encode())
    digest.update(str(sysconfig.get_config_var("SOABI")).encode())
    return digest.hexdigest()


def device_sources(device: str, folder: Path = SOURCE_DIR) -> str:
    """Return a hash of the sources of one device's kernels in a csrc folder; compilers do not count."""
    return _digest(DEVICE_SOURCES[device], folder).hexdigest()


def _digest(patterns: tuple[str, ...], folder: Path) -> hashlib._Hash:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest


def compiler_version(compiler: str) -> str:
    """Return the first line of `compiler --version`."""
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    return text.splitlines()[0].strip()


def find_nvcc() -> str | None:
    """Return nvcc's path, or None where CMake finds no nvcc: it looks in the same places."""
    folders = [f"{os.environ['CUDA_HOME']}/bin"] if os.environ.get("CUDA_HOME") else []
    folders += ["/usr/local/cuda/bin", os.environ.get("PATH", os.defpath)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def nvcc_version() -> str | None:
    """Return nvcc's release (such as "13.0"), or None where there is no nvcc."""
    try:
        nvcc = find_nvcc()
        if nvcc is None:
            return None
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", text)
    return release.group(1) if release else None


def main() -> None:
    """Run `build_info.py hash --compiler CXX` or `build_info.py write ... --output FILE`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("hash", "write"))
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--extension", type=Path)
    parser.add_argument("--isa-paths", nargs="+", default=["generic"])
    parser.add_argument("--cuda-archs", default="sm_90a", help="comma separated; without nvcc they are not built")
    parser.add_argument("--cuda-reports", type=Path, nargs="*", default=[], help="of compile_cuda.py; none: no nvcc")
    parser.add_argument("--cuda-why-not", default="", help="why there are no CUDA kernels")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.action == "hash":
        print(source_hash(options.compiler, options.cuda_archs))
        return
    kernels = [entry for report in options.cuda_reports for entry in json.loads(report.read_text(encoding="utf-8"))]
    info = {
        "source_hash": source_hash(options.compiler, options.cuda_archs),
        "sources": {device: device_sources(device) for device in DEVICE_SOURCES},
        "cpu_ops": list(CPU_OPS),
        "cuda_ops": list(CUDA_OPS) if kernels else [],
        "cuda_archs": options.cuda_archs.split(",") if kernels else [],
        "cuda_why_not": "" if kernels else options.cuda_why_not,
        "extension": options.extension.name,
        "compiler": compiler_version(options.compiler),
        "nvcc": nvcc_version(),
        "isa_paths": options.isa_paths,
        "kernels": kernels,
    }
    options.output.write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
