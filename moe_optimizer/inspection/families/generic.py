"""Rules for a model of no known family: every field name that any family uses."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.latent_attention import LatentAttention
from moe_optimizer.inspection.layer_rules import (
    ExpertRule,
    after_first,
    both,
    every_offset,
    except_indices,
    first_given,
    flags,
    multiples,
    only_indices,
    sparse_step,
    unless_off,
    within,
    words,
)

COUNT = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
    "num_moe_experts",
    "n_experts",
    "ffn_config.moe_num_experts",
    "moe_config.num_experts",
    "moe_config.moe_num_experts",
)
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "experts_per_token",
    "num_selected_experts",
    "num_activated_experts",
    "router_topk",
    "moe_router_topk",
    "n_activated_experts",
    "ffn_config.moe_top_k",
    "moe_config.moe_top_k",
)
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
SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")


def _frequency(config: Config, num_layers: int) -> tuple[bool, ...]:
    rule = flags("moe_layer_freq") if isinstance(config.get("moe_layer_freq"), list) else multiples("moe_layer_freq")
    return rule(config, num_layers)


BY_FIELDS: ExpertRule = first_given(
    ("mlp_layer_types", words("mlp_layer_types", "sparse")),
    ("moe_layers_enum", only_indices("moe_layers_enum")),
    ("moe_layer_indices", only_indices("moe_layer_indices")),
    ("is_moe_layer", flags("is_moe_layer")),
    ("expert_layer_period", every_offset("expert_layer_period", "expert_layer_offset")),
    ("interleave_moe_layer_step", sparse_step("interleave_moe_layer_step")),
    ("moe_layer_interval", within("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")),
    otherwise=both(
        except_indices("mlp_only_layers"),
        sparse_step("decoder_sparse_step"),
        after_first(("first_k_dense_replace", "num_dense_layers")),
        _frequency,
    ),
)
LAYER_RULE = both(unless_off("is_moe", "use_moe"), BY_FIELDS)


def _kinds(config: Config, num_layers: int) -> tuple[str, ...]:
    """Latent attention where the file has its ranks."""
    return ("latent" if config.get("kv_lora_rank") and config.get("v_head_dim") else "attention",) * num_layers


FAMILY = Family(
    model_types=(),
    kinds=_kinds,
    mixers={"attention": Attention(), "latent": LatentAttention()},
    dense=Dense(multiple_of_hidden=4),
    experts=Experts(
        count=COUNT,
        top_k=TOP_K,
        width=WIDTH,
        arrays=True,
        layers=LAYER_RULE,
        shared=Shared(count=SHARED_COUNT, total_width=SHARED_WIDTH),
    ),
)
