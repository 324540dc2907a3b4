"""Kernels in the caches of compilers."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.inspection.compiler_caches import cache_folders, cached_kernels


def test_kernels_in_the_caches_of_libraries_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "deep_gemm" / "cache" / "kernel.fp8_gemm.abc").mkdir(parents=True)
    ops = tmp_path / ".cache" / "flashinfer" / "0.7" / "90a" / "cached_ops" / "sampling"
    ops.mkdir(parents=True)
    (ops / "sampling.so").touch()
    (ops / "build.ninja").touch()
    graph = tmp_path / "torch_compile_cache" / "torch_aot_compile" / "291d" / "inductor_cache" / "wr"
    graph.mkdir(parents=True)
    (graph / "cwr.py").touch()
    (tmp_path / "triton" / "ABC").mkdir(parents=True)
    environment = dict.fromkeys(("VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE"), str(tmp_path))
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "none")}
    assert set(cached_kernels(cache_folders(environment))) == {
        "DeepGEMM kernel kernel.fp8_gemm.abc",
        "FlashInfer kernel sampling",
        "Triton kernel ABC",
        "vLLM's Inductor kernel cwr.py",
    }
