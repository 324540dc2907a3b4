"""Mixtral, Qwen and other families with grouped-query attention and softmax or sigmoid routing."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Experts, Shared
from moe_optimizer.inspection.layer_rules import both, except_indices, sparse_step, windowed_from, windowed_when

QWEN_SPARSE = both(except_indices("mlp_only_layers"), sparse_step("decoder_sparse_step"))
QWEN_WINDOW = windowed_from("max_window_layers", flag="use_sliding_window")

QWEN3_EXPERTS = Experts(
    count=("num_experts", "num_local_experts"),
    top_k=("num_experts_per_tok",),
    width=("moe_intermediate_size",),
    layers=QWEN_SPARSE,
)

FAMILIES = (
    Family(model_types=("llama",), architectures=("LlamaForCausalLM",)),
    Family(
        model_types=("mixtral",),
        architectures=("MixtralForCausalLM",),
        kinds=windowed_when(True),
        mixers={"attention": Attention(qkv_bias=False, o_bias=False)},
        experts=Experts(count=("num_local_experts",), top_k=("num_experts_per_tok",), width=("intermediate_size",)),
    ),
    Family(
        model_types=("qwen2_moe",),
        architectures=("Qwen2MoeForCausalLM",),
        kinds=QWEN_WINDOW,
        mixers={"attention": Attention(qkv_bias=("qkv_bias",), o_bias=False)},
        experts=Experts(
            count=("num_experts",),
            top_k=("num_experts_per_tok",),
            width=("moe_intermediate_size",),
            layers=QWEN_SPARSE,
            shared=Shared(count=1, width=("shared_expert_intermediate_size",), width_is_total=True, gate=True),
        ),
        defaults={"qkv_bias": True},
    ),
    Family(
        model_types=("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"),
        architectures=("Qwen3MoeForCausalLM",),
        kinds=QWEN_WINDOW,
        mixers={"attention": Attention(qk_norm="head")},
        experts=QWEN3_EXPERTS,
    ),
)
