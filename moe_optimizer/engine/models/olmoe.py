"""OLMoE: queries and keys are normalized over all heads of a token together, and may be clipped."""

from torch import nn

from moe_optimizer.engine.models.decoder import CausalLM


class OlmoeForCausalLM(CausalLM):
    """`model_type` olmoe."""

    qk_norm = "whole"

    def mlp(self, layer: int) -> nn.Module:
        config = self.config
        return self.moe(config.num_experts, config.intermediate_size, renormalize=config.norm_topk_prob)
