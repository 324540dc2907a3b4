"""Offers our experts class first where vLLM chooses the kernel of FP8 MoE layers."""

from __future__ import annotations

from moe_optimizer.vllm_plugin.experts.kernel_choice import REMOVE_WHEN, WHY, offering
from moe_optimizer.vllm_plugin.patch import Patch


def _cuda_class() -> type:
    from moe_optimizer.vllm_plugin.experts.fp8_cuda import MoeOptimizerFp8CudaExperts

    return MoeOptimizerFp8CudaExperts


FP8_ORACLE = Patch(
    target="vllm.model_executor.layers.fused_moe.oracle.fp8:backend_to_kernel_cls",
    why=WHY,
    remove_when=REMOVE_WHEN,
    fingerprints={
        "0.26 to 0.30": "93d904bd592f4ea8",
        "0.31 to 0.32": "4be97248bb34cafb",
        "0.33": "4b482574a5636522",
    },
    replacement=offering({"TRITON": _cuda_class}),
)
