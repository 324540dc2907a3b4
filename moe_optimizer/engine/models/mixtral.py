"""Mixtral: experts in every layer, w1, w3 and w2 in its checkpoints."""

from torch import nn

from moe_optimizer.engine.models.decoder import CausalLM


class MixtralForCausalLM(CausalLM):
    """`model_type` mixtral."""

    expert_names = ("w1", "w3", "w2")
    mlp_name = "block_sparse_moe"

    def mlp(self, layer: int) -> nn.Module:
        return self.moe(self.config.num_local_experts, self.config.intermediate_size, renormalize=True)
