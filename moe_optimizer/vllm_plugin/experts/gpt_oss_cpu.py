"""The experts class for gpt-oss's checkpoints on vLLM's CPU build."""

from __future__ import annotations

import torch

from moe_optimizer.vllm_plugin.experts.gpt_oss_experts import GptOssExperts
from moe_optimizer.vllm_plugin.experts.stored_cpu import MoeOptimizerStoredCpuExperts


class MoeOptimizerGptOssCpuExperts(GptOssExperts, MoeOptimizerStoredCpuExperts):
    """Experts in MXFP4 as stored, with biases and the clamped activation."""

    dtypes = (torch.bfloat16,)
