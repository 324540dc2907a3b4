"""Qwen3-MoE: Qwen3 with experts in most layers."""

from torch import nn

from moe_optimizer.engine.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """`model_type` qwen3_moe."""

    def mlp(self, layer: int) -> nn.Module:
        """Return experts, or in the layers that the configuration says a dense MLP."""
        config = self.config
        dense = layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step
        if dense or not config.num_experts:
            return super().mlp(layer)
        return self.moe(config.num_experts, config.moe_intermediate_size, renormalize=config.norm_topk_prob)
