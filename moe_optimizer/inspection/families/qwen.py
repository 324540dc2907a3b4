"""Qwen: dense, experts with a step or an exception list, and the hybrids with gated delta-net layers."""

from __future__ import annotations

from dataclasses import replace

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Experts, Shared
from moe_optimizer.inspection.layer_rules import by_fields, last_of, listed, windowed
from moe_optimizer.inspection.recurrent import gated_delta_net

WINDOW = listed(otherwise=windowed(flag="use_sliding_window", first="max_window_layers"))

QWEN2_EXPERTS = Experts(
    layers=by_fields(),
    shared=Shared(count=1, width=("shared_expert_intermediate_size",), width_is_total=True, gate=True),
)
QWEN3_ATTENTION = Attention(qk_norm="head")
GATED_ATTENTION = Attention(qk_norm="head", gate="width", gate_bias="attention_bias")
QWEN3_NEXT = Family(
    names=("qwen3_next",),
    kinds=listed(otherwise=last_of("full_attention_interval", otherwise="linear", default=4)),
    mixers={"attention": GATED_ATTENTION, "linear": gated_delta_net},
    experts=QWEN2_EXPERTS,
)

FAMILIES = (
    Family(
        names=("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        kinds=WINDOW,
        mixers={"attention": Attention(qkv_bias=True, o_bias=False)},
    ),
    Family(
        names=("qwen2_moe",),
        kinds=WINDOW,
        mixers={"attention": Attention(qkv_bias=("qkv_bias",), o_bias=False)},
        experts=QWEN2_EXPERTS,
    ),
    Family(
        names=("qwen3", "qwen3_vl_text", "qwen3_omni_moe_talker_code_predictor"),
        kinds=WINDOW,
        mixers={"attention": QWEN3_ATTENTION},
    ),
    Family(
        names=(
            "qwen3_moe",
            "qwen3_vl_moe_text",
            "qwen3_omni_moe_text",
            "interns1_pro_text",
            "intern_s1_pro_text",
            "InternS1ProForConditionalGeneration",
        ),
        kinds=windowed(flag="use_sliding_window", first="max_window_layers"),
        mixers={"attention": QWEN3_ATTENTION},
        experts=Experts(layers=by_fields()),
    ),
    QWEN3_NEXT,
    replace(QWEN3_NEXT, names=("qwen3_5_text", "qwen3_5"), experts=None),
    replace(QWEN3_NEXT, names=("qwen3_5_moe_text", "qwen3_5_moe")),
)
