"""Builds the part of FlashInfer's CUTLASS MoE for Hopper that is timed: all of it takes too long.

    python benchmarks/ops/build_flashinfer_moe.py [--formats bf16,fp8,mxfp4] [--jobs 16]

FlashInfer compiles its module when it is first used: 220 generated sources for all pairs of types, and 28 more. Here
only those that the formats need are compiled, by the rules that FlashInfer writes: 35, with MXFP4 58. A function of
another format ends the process if it is called. The library goes where FlashInfer looks for one that was built ahead:
flashinfer/data/aot.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LEFT_OUT = re.compile(r"/gemm/90/|moe_gemm_kernels_(?!bf16_bf16|bf16_fp8|bf16_fp4)")
"""Dense products, and pairs of types of which none is timed."""
INSTANTIATED = {
    "bf16": ("(Sm90, __nv_bfloat16, __nv_bfloat16,", "sm80_generic_fused_moe_gemm_kernelLauncher<cutlass::bfloat16_t"),
    "mxfp4": ("Launcher<__nv_bfloat16, SafeFP4,",),
}
"""What a generated source has, by format (Ampere's kernels are among those that FlashInfer tries on Hopper). FP8 by
block is one source, which is always built."""

ENDS = """#include <stdio.h>
#include <stdlib.h>
static void ends(void) {
    fputs("FlashInfer: a function of a format that build_flashinfer_moe.py did not build\\n", stderr);
    abort();
}
"""


def main() -> int:
    """Build; 0 if FlashInfer finds the library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bf16,fp8,mxfp4")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    from flashinfer.jit import env
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

    started = time.monotonic()
    spec: Any = gen_cutlass_fused_moe_sm90_module()
    spec.sources = [source for source in spec.sources if is_needed(Path(source), options.formats.split(","))]
    spec.write_ninja()
    objects = [Path(path) for path in spec.get_object_paths()]
    print(f"{len(objects)} sources for {options.formats}, {options.jobs} at once", flush=True)
    given = os.environ.get("CPATH")
    include = os.pathsep.join([*([given] if given else []), *cublas_headers()])
    subprocess.run(
        [*ninja(), "-f", str(spec.ninja_path), "-j", str(options.jobs), *map(str, objects)],
        check=True, cwd=spec.ninja_path.parent, env={**os.environ, "CPATH": include},
    )  # fmt: skip
    library = Path(env.FLASHINFER_AOT_DIR) / spec.name / f"{spec.name}.so"
    link(objects, library)
    size = library.stat().st_size / 2**20
    print(f"{library.name}: {size:.1f} MiB after {time.monotonic() - started:.0f} s", flush=True)
    return 0 if spec.is_aot else 1


def is_needed(source: Path, formats: list[str]) -> bool:
    """Whether a source has kernels of the formats, or is none of those that have kernels of one pair of types."""
    if LEFT_OUT.search(str(source)):
        return False
    if ".generated." not in source.name:
        return True
    text = source.read_text()
    return any(sign in text for name in formats for sign in INSTANTIATED.get(name, ()))


def ninja() -> list[str]:
    """The command, or the module that pip installed without one."""
    found = shutil.which("ninja")
    return [found] if found else [sys.executable, "-m", "ninja"]


def packages() -> Path:
    """The folder that torch is installed in."""
    import torch

    return Path(torch.__file__).parents[1]


def cublas_headers() -> list[str]:
    """Folders that hold cublasLt.h, where CUDA's own does not: pip installs it beside torch."""
    return sorted({str(path.parent) for path in packages().glob("nvidia/**/include/cublasLt.h")})


def link(objects: list[Path], library: Path) -> None:
    """Link what was compiled; a function that was not ends the process and says so."""
    absent = sorted(undefined(objects) - defined(objects))
    stubs = library.parent / "stubs.c"
    library.parent.mkdir(parents=True, exist_ok=True)
    ends = [f'void n{i}(void) __asm__("{name}"); void n{i}(void) {{ ends(); }}' for i, name in enumerate(absent)]
    stubs.write_text(ENDS + "\n".join(ends) + "\n")
    print(f"{len(absent)} functions of other formats stand for nothing", flush=True)
    found = {name: shared_library(name) for name in ("libcudart.so", "libnvrtc.so", "libcuda.so")}
    print(", ".join(f"{name}: {path or 'not found, left open'}" for name, path in found.items()), flush=True)
    libraries = [str(path) for path in found.values() if path]
    given = [*map(str, objects), "-x", "c", str(stubs), "-x", "none", *libraries]
    subprocess.run(["c++", "-shared", "-fPIC", "-o", str(library), *given], check=True)


def shared_library(name: str) -> Path | None:
    """The file of CUDA's toolkit, of pip's packages or of the driver, whatever its version ends in."""
    roots = (Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda"), packages() / "nvidia",
             Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/local/nvidia"))  # fmt: skip
    for root in roots:
        for pattern in (f"{name}*", f"lib*/{name}*", f"*/lib/{name}*", f"lib*/stubs/{name}*"):
            for path in sorted(root.glob(pattern)):
                if ".alt." not in path.name:
                    return path
    return None


def undefined(objects: list[Path]) -> set[str]:
    """C++ names of TensorRT-LLM's part that the objects want from elsewhere."""
    return {name for name in names(objects, "--undefined-only") if name.startswith("_Z") and "tensorrt_llm" in name}


def defined(objects: list[Path]) -> set[str]:
    """Names that one of the objects has."""
    return names(objects, "--defined-only")


def names(objects: list[Path], which: str) -> set[str]:
    """Names in the symbol tables of the objects."""
    shown = subprocess.run(["nm", which, *map(str, objects)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in shown.splitlines() if line.strip() and not line.endswith(":")}


if __name__ == "__main__":
    sys.exit(main())
