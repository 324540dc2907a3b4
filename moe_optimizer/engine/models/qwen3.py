"""Qwen3, dense: queries and keys are normalized head by head."""

from __future__ import annotations

from torch import nn

from moe_optimizer.engine.layers.attention import Attention
from moe_optimizer.engine.layers.mlp import MLP
from moe_optimizer.engine.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """`model_type` qwen3."""

    def attention(self, layer: int) -> Attention:
        """See `CausalLM`."""
        return Attention(
            self.config.hidden_size,
            num_heads=self.config.num_attention_heads,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.head_dim,
            bias=self.config.attention_bias,
            qk_norm="head",
            eps=self.config.rms_norm_eps,
        )

    def mlp(self, layer: int) -> nn.Module:
        """See `CausalLM`."""
        return MLP(self.config.hidden_size, self.config.intermediate_size)
