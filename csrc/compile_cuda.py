"""Compiles one CUDA source with nvcc, warnings as errors, and writes what ptxas said of every kernel as JSON.

Standard library only: it runs inside CMake, before the package is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent


def main() -> int:
    """Run nvcc; its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--archs", required=True, help="comma separated, such as sm_90a")
    parser.add_argument("--host-compiler", required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--object", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    codes = [
        f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in options.archs.split(",") if arch
    ]
    command = [
        options.nvcc, "-std=c++17", "-O3", "-lineinfo", *codes, "-ccbin", options.host_compiler,
        "-Xptxas", "-v", "-Werror", "all-warnings", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall",
        f"-I{SOURCE_DIR}", f"-I{SOURCE_DIR / 'include'}", "-c", str(options.source), "-o", str(options.object),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        return done.returncode
    notes = performance_losses(done.stdout + done.stderr)
    if notes:
        sys.stderr.write("".join(f"compile_cuda.py: {options.source.name}: {note}\n" for note in notes))
        return 1
    kernels = parse_report(done.stdout + done.stderr)
    options.report.write_text(json.dumps(kernels, indent=2) + "\n", encoding="utf-8")
    return 0


def performance_losses(text: str) -> list[str]:
    """Return what ptxas says it could not keep fast, such as products of the tensor cores that wait for one another.

    It says so as "info" even where warnings are errors, and the kernels stay right: a lost half of the speed would show
    nowhere else without a GPU.
    """
    return [line.strip() for line in text.splitlines() if "Potential Performance Loss" in line]


def parse_report(text: str) -> list[dict[str, str | int]]:
    """Return one entry per kernel of `ptxas -v` output, in its order.

    Keys: name, arch, registers (per thread, at launch), shared_bytes (static), spill_bytes (stores and loads),
    stack_bytes. A kernel for which ptxas left out a line is an error: a missing number must not read as zero.
    """
    entries: list[dict[str, str | int]] = []
    for part in re.split(r"ptxas info\s+: Compiling entry function ", text)[1:]:
        head = re.match(r"'(?P<mangled>\w+)' for '(?P<arch>\w+)'", part)
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        if head is None or memory is None or registers is None:
            raise SystemExit(f"compile_cuda.py: cannot read the ptxas report of {part[:200]!r}")
        shared = re.search(r"(\d+) bytes smem", part)
        entries.append(
            {
                "name": kernel_name(head["mangled"]),
                "arch": head["arch"],
                "registers": int(registers[1]),
                "shared_bytes": int(shared[1]) if shared else 0,
                "spill_bytes": int(memory[2]) + int(memory[3]),
                "stack_bytes": int(memory[1]),
            }
        )
    return entries


def kernel_name(mangled: str) -> str:
    """Return a readable name: _ZN6moeopt14combine_kernelILi0EEEvNS_... becomes combine_kernel<0>."""
    match = re.match(r"_ZN6moeopt(\d+)", mangled)
    if match is None:
        return mangled
    end = match.end() + int(match[1])
    # Template arguments: Li2E, Lb1E, LNS_11DecodePhaseE0E, one after the other, up to the closing E.
    arguments = re.match(r"I((?:L(?:i|b|NS_\d+[A-Za-z]\w*?E)\d+E)+)E", mangled[end:])
    numbers = re.findall(r"(\d+)E(?=L|$)", arguments[1]) if arguments else []
    return mangled[match.end() : end] + (f"<{', '.join(numbers)}>" if numbers else "")


if __name__ == "__main__":
    sys.exit(main())
