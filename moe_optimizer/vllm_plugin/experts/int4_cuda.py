"""The experts class for INT4 checkpoints on a GPU."""

from __future__ import annotations

from moe_optimizer.vllm_plugin.experts.int4_experts import Int4Experts
from moe_optimizer.vllm_plugin.experts.stored_cuda import MoeOptimizerStoredCudaExperts


class MoeOptimizerInt4CudaExperts(Int4Experts, MoeOptimizerStoredCudaExperts):
    """Experts in INT4 as the checkpoint has them, at every number of tokens."""
