"""OLMoE: queries and keys are normalized over all heads of a token together, and may be clipped."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from moe_optimizer.engine.layers.attention import QKNorm
from moe_optimizer.engine.models.decoder import CausalLM


class OlmoeForCausalLM(CausalLM):
    """`model_type` olmoe."""

    qk_norm: ClassVar[QKNorm] = "whole"

    def mlp(self, layer: int) -> nn.Module:
        """Return the same for every layer."""
        config = self.config
        return self.moe(config.intermediate_size, config.num_experts, renormalize=config.norm_topk_prob)
