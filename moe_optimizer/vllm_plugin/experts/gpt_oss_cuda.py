"""The experts class for gpt-oss's checkpoints on a GPU."""

from __future__ import annotations

from typing import ClassVar

from moe_optimizer.vllm_plugin.experts.gpt_oss_experts import GptOssExperts
from moe_optimizer.vllm_plugin.experts.stored_cuda import MoeOptimizerStoredCudaExperts


class MoeOptimizerGptOssCudaExperts(GptOssExperts, MoeOptimizerStoredCudaExperts):
    """Experts in MXFP4 as stored, with biases and the clamped activation, at every number of tokens."""

    has_biases: ClassVar[bool] = True
