"""The experts class for gpt-oss's checkpoints on a GPU."""

from __future__ import annotations

from typing import Any, ClassVar

from moe_optimizer.ops.four_bit_codes import rows_on_lines
from moe_optimizer.vllm_plugin.experts.gpt_oss_experts import GptOssExperts
from moe_optimizer.vllm_plugin.experts.stored_cuda import MoeOptimizerStoredCudaExperts


class MoeOptimizerGptOssCudaExperts(GptOssExperts, MoeOptimizerStoredCudaExperts):
    """Experts in MXFP4 as stored, with biases and the clamped activation, at every number of tokens."""

    has_biases: ClassVar[bool] = True

    def finish_loading(self, layer: Any) -> None:
        """Have the rows begin where the memory of a GPU is read fastest, then do as for all stored experts.

        Raises:
            RequiredNotAppliedError: a kernel is wrong; no other reads the weights as they are.
        """
        # The parameters stay vLLM's: a reload looks for its loader on them, and copies into what they hold.
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data = rows_on_lines(weight.data)
        super().finish_loading(layer)
