"""The experts class for INT4 checkpoints on vLLM's CPU build."""

from __future__ import annotations

import torch

from moe_optimizer.vllm_plugin.experts.int4_experts import Int4Experts
from moe_optimizer.vllm_plugin.experts.stored_cpu import MoeOptimizerStoredCpuExperts


class MoeOptimizerInt4CpuExperts(Int4Experts, MoeOptimizerStoredCpuExperts):
    """Experts in INT4 as the checkpoint has them."""

    dtypes = (torch.bfloat16, torch.float16)
