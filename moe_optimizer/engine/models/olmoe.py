"""OLMoE: queries and keys are normalized over all heads of a token together, and may be clipped."""

from __future__ import annotations

from torch import nn

from moe_optimizer.engine.layers.attention import Attention
from moe_optimizer.engine.layers.moe import MoE
from moe_optimizer.engine.models.decoder import CausalLM


class OlmoeForCausalLM(CausalLM):
    """`model_type` olmoe."""

    def attention(self, layer: int) -> Attention:
        """See `CausalLM`."""
        return Attention(
            self.config.hidden_size,
            num_heads=self.config.num_attention_heads,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.head_dim,
            bias=self.config.attention_bias,
            qk_norm="whole",
            eps=self.config.rms_norm_eps,
            clip=self.config.clip_qkv,
        )

    def mlp(self, layer: int) -> nn.Module:
        """See `CausalLM`."""
        return MoE(
            self.config.hidden_size,
            self.config.intermediate_size,
            num_experts=self.config.num_experts,
            top_k=self.config.num_experts_per_tok,
            renormalize=self.config.norm_topk_prob,
        )
