"""Offers our experts classes first where vLLM chooses the kernel of unquantized MoE layers."""

from __future__ import annotations

from moe_optimizer.vllm_plugin.experts.kernel_choice import REMOVE_WHEN, WHY, offering
from moe_optimizer.vllm_plugin.patch import Patch


def _cpu_class() -> type:
    from moe_optimizer.vllm_plugin.experts.cpu import MoeOptimizerCpuExperts

    return MoeOptimizerCpuExperts


def _cuda_class() -> type:
    from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts

    return MoeOptimizerCudaExperts


UNQUANTIZED_ORACLE = Patch(
    target="vllm.model_executor.layers.fused_moe.oracle.unquantized:backend_to_kernel_cls",
    why=WHY,
    remove_when=REMOVE_WHEN,
    fingerprints={
        "0.26 to 0.27": "4f8ac45abed86ca6",
        "0.28 to 0.30": "89a607bc5f183ec7",
        "0.31 to 0.32": "259b71de159bb70d",
        "0.33": "f0914422b8321d51",
    },
    replacement=offering({"CPU": _cpu_class, "TRITON": _cuda_class}),
)
