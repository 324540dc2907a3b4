"""GPU tests run on a Hopper GPU with the CUDA kernels built; elsewhere they are skipped with the reason."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from moe_optimizer.ops import _load


@pytest.fixture(scope="session", autouse=True)
def hopper() -> None:
    """Skip unless the kernels can run here."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: torch sees none")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0 (H100, H200), this GPU has {capability[0]}.{capability[1]}")
    available, reason = _load.kernels_available()
    if not available:
        pytest.skip(f"needs the compiled kernels: {reason}; run: bash build.sh")
    if not hasattr(_load.kernels(), "cuda_run"):
        pytest.skip("needs the CUDA kernels: the build found no nvcc")


@pytest.fixture(scope="module")
def two_gpus_and_nixl() -> None:
    """Skip unless two GPUs, NIXL and the router are there."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA GPUs, found {torch.cuda.device_count()}")
    for name in ("nixl", "vllm_router"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the package {name}")
