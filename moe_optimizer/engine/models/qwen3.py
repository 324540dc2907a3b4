"""Qwen3, dense: queries and keys are normalized head by head."""

from torch import nn

from moe_optimizer.engine.layers.mlp import MLP
from moe_optimizer.engine.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """`model_type` qwen3."""

    qk_norm = "head"

    def mlp(self, layer: int) -> nn.Module:
        return MLP(self.config.hidden_size, self.config.intermediate_size, ranks=self.ranks)
