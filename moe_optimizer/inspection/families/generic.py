"""Reads a model of no known family by every field name that any family uses."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.latent_attention import LatentAttention
from moe_optimizer.inspection.layer_rules import both, by_fields, unless_off

WIDTH = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "moe_ffn_hidden_size",
    "expert_hidden_dim",
    "moe_expert_inner_dim",
    "expert_intermediate_size",
    "moe_inter_dim",
    "ffn_config.ffn_hidden_size",
    "moe_config.ffn_hidden_size",
    "intermediate_size",
    "ffn_hidden_size",
)
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")


def _kinds(config: Config, num_layers: int) -> tuple[str, ...]:
    """Latent attention where the file has its ranks."""
    return ("latent" if config.get("kv_lora_rank") and config.get("v_head_dim") else "attention",) * num_layers


FAMILY = Family(
    names=(),
    kinds=_kinds,
    mixers={"attention": Attention(), "latent": LatentAttention()},
    dense=Dense(multiple_of_hidden=4),
    experts=Experts(
        width=WIDTH,
        arrays=True,
        layers=both(unless_off("is_moe", "use_moe"), by_fields()),
        shared=Shared(total_width=SHARED_WIDTH),
    ),
)
