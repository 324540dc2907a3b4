"""OLMoE: queries and keys are normalized over all heads of a token together, and may be clipped."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from moe_optimizer.engine.layers.attention import QKNorm
from moe_optimizer.engine.layers.moe import MoE
from moe_optimizer.engine.models.decoder import CausalLM


class OlmoeForCausalLM(CausalLM):
    """`model_type` olmoe."""

    qk_norm: ClassVar[QKNorm] = "whole"

    def mlp(self, layer: int) -> nn.Module:
        """Return the same for every layer."""
        return MoE(
            self.config.hidden_size,
            self.config.intermediate_size,
            num_experts=self.config.num_experts,
            top_k=self.config.num_experts_per_tok,
            ranks=self.ranks,
            renormalize=self.config.norm_topk_prob,
        )
