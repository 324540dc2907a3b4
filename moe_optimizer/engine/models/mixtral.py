"""Mixtral: experts in every layer, w1, w3 and w2 in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from moe_optimizer.engine.models.decoder import CausalLM


class MixtralForCausalLM(CausalLM):
    """`model_type` mixtral."""

    expert_matrices: ClassVar[Mapping[str, str]] = {"w1": "gate", "w3": "up", "w2": "down"}
    renamed: ClassVar[Mapping[str, str]] = {".block_sparse_moe.": ".mlp."}

    def mlp(self, layer: int) -> nn.Module:
        """Return the same for every layer."""
        return self.moe(self.config.intermediate_size, self.config.num_local_experts, renormalize=True)
