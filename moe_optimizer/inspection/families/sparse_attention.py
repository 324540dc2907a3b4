"""Decoders whose attention compresses, chooses, factorises or routes."""

from __future__ import annotations

from dataclasses import replace

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.disagreements import shared_all_the_same
from moe_optimizer.inspection.families.common_parts import HEAD_NORMED, hyper_head, square_hyper
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.layer_rules import by_fields, every, last_of, listed, numbered
from moe_optimizer.inspection.sparse_attention import CompressedAttention, FactorizedAttention, RoutedAttention

STEP_ATTENTION = Attention(o_bias=False, qk_norm="head", gate="head", gate_when="use_head_wise_attn_gate")
STEP_EXPERTS = Experts(
    layers=by_fields(first_dense=1),
    shared=Shared(count=1, width=("share_expert_dim",), width_is_total=True),
)


def _other_heads(config: Config, heads: int) -> int:
    """Key/value heads of the layers that have settings of their own."""
    return (
        config.integer("attention_other_setting.num_attention_groups", minimum=1)
        or config.integer(("num_attention_groups", "num_key_value_heads"), heads, minimum=1)
        or heads
    )


FAMILIES = (
    Family(
        model_types=("deepseek_v4", "deepseek_ref"),
        architectures=("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"),
        disagreement=shared_all_the_same("n_shared_experts"),
        kinds=every("sliding"),
        mixers={"sliding": CompressedAttention()},
        dense=None,
        layer_extra=square_hyper,
        model_extra=hyper_head,
        experts=Experts(
            shared=Shared(),
        ),
    ),
    Family(
        model_types=("minimax_m3", "minimax_m3_vl_text"),
        architectures=("MiniMaxM3SparseForCausalLM", "MiniMaxM3ForCausalLM"),
        kinds=listed(
            otherwise=numbered(
                "sparse_attention_config.sparse_attention_freq",
                {0: "attention", 1: "sparse"},
                otherwise=every("attention"),
            ),
            names={"full_attention": "attention", "minimax_m3_sparse": "sparse"},
        ),
        mixers={
            "attention": HEAD_NORMED,
            "sparse": replace(
                HEAD_NORMED,
                indexer_heads=("index_n_heads", "sparse_attention_config.sparse_num_index_heads"),
                indexer_dim=("index_head_dim", "sparse_attention_config.sparse_index_dim"),
            ),
        },
        dense=Dense(width=("dense_intermediate_size",), bias=False),
        experts=Experts(
            width=("intermediate_size", "moe_intermediate_size"),
            layers=by_fields(),
            shared=Shared(total_width=("shared_intermediate_size",)),
        ),
    ),
    Family(
        model_types=("step3_text",),
        architectures=("Step3TextForCausalLM",),
        mixers={"attention": FactorizedAttention()},
        experts=STEP_EXPERTS,
    ),
    Family(
        model_types=("step3p5", "step3p7"),
        architectures=("Step3p5ForCausalLM", "Step3p7ForCausalLM", "Step3p7FlashForCausalLM"),
        kinds=listed(otherwise=last_of((), "attention", otherwise="sliding", default=2)),
        mixers={
            "attention": STEP_ATTENTION,
            "sliding": replace(
                STEP_ATTENTION,
                heads=("attention_other_setting.num_attention_heads", "num_attention_heads"),
                kv_heads=_other_heads,
                head_dim=("attention_other_setting.head_dim", "head_dim"),
            ),
        },
        experts=STEP_EXPERTS,
    ),
    Family(
        model_types=("jetmoe",),
        architectures=("JetMoeForCausalLM", "JetMoEForCausalLM"),
        mixers={"attention": RoutedAttention()},
        dense=None,
        layer_extra=lambda site: site.hidden_size,  # a bias on the experts' sum
        experts=Experts(
            width=("intermediate_size", "ffn_hidden_size"),
            one_is_dense=False,
        ),
    ),
)
