"""DeepSeek and the families that took over its latent attention and its experts."""

from __future__ import annotations

from moe_optimizer.inspection.attention import LatentAttention
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Experts, Shared
from moe_optimizer.inspection.layer_rules import after_first, both, multiples

DEEPSEEK_LAYERS = both(after_first("first_k_dense_replace"), multiples("moe_layer_freq"))

DEEPSEEK_EXPERTS = Experts(
    count=("n_routed_experts",),
    top_k=("num_experts_per_tok",),
    width=("moe_intermediate_size",),
    layers=DEEPSEEK_LAYERS,
    shared=Shared(count=("n_shared_experts",)),
)
DEEPSEEK_V3_EXPERTS = Experts(
    count=("n_routed_experts",),
    top_k=("num_experts_per_tok",),
    width=("moe_intermediate_size",),
    layers=DEEPSEEK_LAYERS,
    correction_bias=True,
    shared=Shared(count=("n_shared_experts",)),
)

FAMILIES = (
    Family(
        model_types=("deepseek_v2",),
        architectures=("DeepseekV2ForCausalLM",),
        mixers={"attention": LatentAttention()},
        experts=DEEPSEEK_EXPERTS,
    ),
    Family(
        model_types=("deepseek_v3", "kimi_k2"),
        architectures=("DeepseekV3ForCausalLM",),
        mixers={"attention": LatentAttention()},
        experts=DEEPSEEK_V3_EXPERTS,
    ),
    Family(
        model_types=("deepseek_v32",),
        architectures=("DeepseekV32ForCausalLM",),
        mixers={"attention": LatentAttention(indexer=True)},
        experts=DEEPSEEK_V3_EXPERTS,
    ),
)
