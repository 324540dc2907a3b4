"""What ptxas says of the CUDA kernels: they spill nothing, and as many blocks fit as are launched."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from moe_optimizer.ops.cuda_variants import TILE_TOKENS

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"


def _compile_cuda() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_cuda", CSRC / "compile_cuda.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN6moeopt19grouped_gemm_kernelILNS_8GemmModeE1ELi64ELb1EEEv14CUtensorMap_st' for 'sm_90a'
ptxas info    : Function properties for _ZN6moeopt19grouped_gemm_kernelILNS_8GemmModeE1ELi64ELb1EEEv14CUtensorMap_st
    80 bytes stack frame, 84 bytes spill stores, 88 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 80 bytes cumulative stack size, 32 bytes smem
"""  # noqa: E501


def test_the_compiler_report_is_read_kernel_by_kernel():
    assert _compile_cuda().parse_report(REPORT) == [
        {
            "name": "grouped_gemm_kernel<1, 64, 1>",
            "arch": "sm_90a",
            "registers": 168,
            "shared_bytes": 32,
            "spill_bytes": 172,
            "stack_bytes": 80,
        }
    ]


def test_a_report_without_its_numbers_is_an_error():
    with pytest.raises(SystemExit, match="ptxas report"):
        _compile_cuda().parse_report(REPORT.replace("spill stores", "something else"))


SERIALIZED = """
#include "moeopt/device.cuh"
__global__ void reads_sums_between_products(float* out, uint64_t a, uint64_t b) {
  float sums[8] = {};
  moeopt::wgmma_fence();
  moeopt::wgmma_bf16(sums, a, b, 0);
  sums[0] += out[0];
  moeopt::wgmma_bf16(sums, a, b, 1);
  moeopt::wgmma_commit_group();
  moeopt::wgmma_wait_group<0>();
  for (float sum : sums) out[threadIdx.x] += sum;
}
"""


def test_a_kernel_whose_products_wait_for_one_another_is_refused(tmp_path):
    compiler, nvcc = shutil.which("g++"), _nvcc()
    source = tmp_path / "serialized.cu"
    source.write_text(SERIALIZED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(CSRC / "compile_cuda.py"), "--nvcc", nvcc, "--archs", "sm_90a",
         "--host-compiler", compiler or "g++", "--source", str(source), "--object", str(tmp_path / "kernel.o"),
         "--report", str(tmp_path / "report.json")],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "serialized.cu: ptxas info" in done.stderr
    assert "wgmma.mma_async" in done.stderr
    assert not (tmp_path / "report.json").exists()


def _nvcc() -> str:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("needs nvcc >= 12.4 to compile the CUDA kernels")
    return nvcc


def _reports(tmp_path: Path) -> list[dict]:
    """Per-kernel reports of the last build if it is of these sources, else of a compilation now."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    manifest = ROOT / "moe_optimizer/ops/build_info.json"
    current = subprocess.run(
        [sys.executable, str(CSRC / "build_info.py"), "hash", "--compiler", compiler],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout.strip()  # fmt: skip
    if manifest.is_file():
        info = json.loads(manifest.read_text(encoding="utf-8"))
        if info["source_hash"] == current and info["kernels"]:
            return info["kernels"]
    nvcc = _nvcc()
    kernels = []
    for source in sorted((CSRC / "launch").glob("*.cu")):
        report = tmp_path / f"{source.stem}.json"
        subprocess.run(
            [sys.executable, str(CSRC / "compile_cuda.py"), "--nvcc", nvcc, "--archs", "sm_90a",
             "--host-compiler", compiler, "--source", str(source), "--object", str(tmp_path / "kernel.o"),
             "--report", str(report)],
            check=True, timeout=500,
        )  # fmt: skip
        kernels += json.loads(report.read_text(encoding="utf-8"))
    return kernels


def test_no_cuda_kernel_spills_and_every_one_fits_the_register_file(tmp_path):
    kernels = _reports(tmp_path)
    names = {entry["name"] for entry in kernels}
    # 3 weight widths and INT4 x up, down, down in a loop, and up in wide steps; the tiles of each mode x up and down;
    # the formats of a dense weight; 5 plain kernels.
    assert len([name for name in names if name.startswith("direct_")]) == 13
    tiles = sum(len(values) for values in TILE_TOKENS.values())
    assert len([name for name in names if name.startswith("grouped_gemm")]) == 2 * tiles
    assert len([name for name in names if name.startswith("skinny_gemm")]) == 3
    assert {name.partition("<")[0] for name in names} == {
        "direct_up_kernel", "direct_down_kernel", "grouped_gemm_kernel",
        "route_tokens_kernel", "gate_topk_kernel", "count_pairs_kernel", "place_pairs_kernel", "combine_kernel",
        "skinny_gemm_kernel",
    }  # fmt: skip
    # INT4 with one buffer of scales: two words of its producers, in two tiles; they were timed so.
    spilling = {
        entry["name"]: entry["spill_bytes"] for entry in kernels if entry["spill_bytes"] or entry["stack_bytes"]
    }
    assert all(name.startswith("grouped_gemm_kernel<4, ") and spilled <= 8 for name, spilled in spilling.items())
    assert len(spilling) <= 2
    threads = {"grouped_gemm_kernel": 384, "direct_down_kernel": 512}
    for entry in kernels:
        count = threads.get(entry["name"].partition("<")[0], 256)
        if entry["name"].startswith("direct_up"):
            weight_bits, pieces, _int4 = (int(n) for n in entry["name"].partition("<")[2].rstrip(">").split(", "))
            count = 256 * (4 if (weight_bits, pieces) == (16, 2) else 2)  # blocks of 256 threads
        # Registers are handed out to warps in units of 256, 8 per thread.
        assert count * -(-entry["registers"] // 8) * 8 <= 65536, entry
