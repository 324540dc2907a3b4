"""Decoders with grouped-query attention, a correction bias in the router, shared experts and dense first layers."""

from __future__ import annotations

from dataclasses import replace

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.disagreements import shared_all_the_same, windowed_heads
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.latent_attention import LatentAttention
from moe_optimizer.inspection.layer_rules import (
    SPARSE_WORDS,
    after_first,
    all_layers,
    by_fields,
    every,
    first_given,
    last_of,
    listed,
    numbered,
    within,
)
from moe_optimizer.inspection.recurrent import LightningAttention
from moe_optimizer.inspection.shapes import ExpertLayer

BAILING_ATTENTION = Attention(
    qkv_bias=("use_qkv_bias", "use_bias"), o_bias="use_bias", qk_norm="head", qk_norm_when="use_qk_norm"
)
BAILING_LINEAR = LightningAttention(qk_norm="use_qk_norm", qkv_bias=("use_qkv_bias", "use_bias"), o_bias="use_bias")
BAILING_EXPERTS = Experts(
    layers=by_fields(),
    bias="use_bias",
    shared=Shared(width=("moe_shared_expert_intermediate_size",), bias="use_bias"),
)
BAILING = Family(
    names=("bailing_moe", "bailing_moe_v2"),
    mixers={"attention": BAILING_ATTENTION},
    dense=Dense(bias="use_bias"),
    experts=BAILING_EXPERTS,
)
SARVAM_EXPERTS = replace(
    BAILING_EXPERTS,
    layers=after_first("first_k_dense_replace", "moe_layer_freq", default=1),
    bias=False,
)


def _head_or_width(config: Config) -> str:
    """How wide the output gate is: true and "per-head" mean a value for each head."""
    gating = config.get("gating")
    return "head" if gating is True or gating == "per-head" else "width"


def _first_and_every_sixth(_: Config, num_layers: int) -> tuple[str, ...]:
    """The first layer and every sixth see everything."""
    return tuple("attention" if i == 0 or (i + 1) % 6 == 0 else "sliding" for i in range(num_layers))


def _swa_kv_heads(config: Config, _: int) -> int:
    """Key/value heads of the windowed layers: their own field, or twice the full layers'."""
    own = config.integer("swa_num_key_value_heads", minimum=1)
    return own or 2 * config.required("num_key_value_heads")


ERNIE_PAIRS = ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index")
"""Fields that hold one value for text experts and one for image experts in multi-modal files."""


def _text_experts(config: Config) -> Config:
    """Where a field holds a value for text and one for images, keep the one for text."""
    first = {name: value[0] for name in ERNIE_PAIRS if isinstance(value := config.raw.get(name), list) and value}
    return Config({**config.raw, **first}, where=config.where, defaults=config.defaults)


def _image_experts(config: Config, layers: tuple[ExpertLayer | None, ...]) -> int:
    """Experts and router rows for image tokens, beside the text experts of the same layers."""
    widths = config.integers("moe_intermediate_size") if isinstance(config.get("moe_intermediate_size"), list) else None
    if widths is None or len(widths) < 2:
        return 0
    counts = config.get("moe_num_experts")
    params = 0
    for layer in layers:
        if layer is not None:
            count = (
                (config.integers("moe_num_experts") or (0, 0))[-1] if isinstance(counts, list) else layer.num_experts
            )
            params += count * (3 * layer.hidden_size * widths[1] + layer.hidden_size + 1)
    return params


FAMILIES = (
    BAILING,
    Family(
        names=("param2moe",),
        mixers={"attention": BAILING_ATTENTION},
        experts=replace(
            BAILING_EXPERTS,
            layers=by_fields(first_dense=1),
            bias=False,
            shared=Shared(
                count=("num_shared_experts",), width=("moe_shared_expert_intermediate_size",), width_is_total=True
            ),
        ),
        defaults={"num_shared_experts": 1},
    ),
    Family(
        names=("sarvam_moe",),
        mixers={"attention": BAILING_ATTENTION},
        experts=SARVAM_EXPERTS,
        defaults={"num_shared_experts": 1, "use_qk_norm": True},
    ),
    Family(
        names=("sarvam_mla",),
        mixers={"attention": LatentAttention(bias=False)},
        experts=SARVAM_EXPERTS,
        defaults={"num_shared_experts": 1},
    ),
    replace(
        BAILING,
        names=("bailing_hybrid", "bailing_moe_v2_5"),
        kinds=last_of("layer_group_size", otherwise="linear"),
        mixers={"attention": LatentAttention(bias=False), "linear": BAILING_LINEAR},
    ),
    replace(
        BAILING,
        names=("bailing_moe_linear", "BailingMoeLinearV2ForCausalLM"),
        kinds=last_of("layer_group_size", otherwise="linear"),
        mixers={"attention": BAILING_ATTENTION, "linear": BAILING_LINEAR},
    ),
    Family(
        names=("ernie4_5_moe", "ernie4_5_moe_vl", "ernie4_5_vl_moe_text", "Ernie4_5_VLMoeForConditionalGeneration"),
        rewrite=_text_experts,
        idle_extra=_image_experts,
        mixers={"attention": Attention(qkv_bias="use_bias", o_bias="use_bias")},
        dense=Dense(bias="use_bias"),
        head_bias="use_bias",
        experts=Experts(
            layers=first_given(SPARSE_WORDS, otherwise=within()),
            correction_bias=True,
            shared=Shared(bias="use_bias"),
        ),
        defaults={"moe_layer_start_index": 1},
    ),
    Family(
        names=("mimo_v2_flash", "mimo_v2"),
        disagreement=windowed_heads,
        kinds=listed(
            otherwise=numbered("hybrid_layer_pattern", {0: "attention", 1: "sliding"}, otherwise=_first_and_every_sixth)
        ),
        mixers={
            "attention": Attention(value_dim=("v_head_dim",), o_bias=False, sinks="add_full_attention_sink_bias"),
            "sliding": Attention(
                heads=("swa_num_attention_heads", "num_attention_heads"),
                kv_heads=_swa_kv_heads,
                head_dim=("swa_head_dim", "head_dim"),
                value_dim=("swa_v_head_dim", "v_head_dim"),
                o_bias=False,
                sinks="add_swa_attention_sink_bias",
            ),
        },
        window=("sliding_window", "sliding_window_size"),
        experts=Experts(
            layers=by_fields(first_dense=1),
        ),
        defaults={"add_swa_attention_sink_bias": True},
    ),
    Family(
        names=("laguna",),
        kinds=listed(otherwise=every("attention")),
        mixers={
            "attention": Attention(
                heads=("num_attention_heads_per_layer", "num_attention_heads"), qk_norm="head", gate=_head_or_width
            )
        },
        experts=Experts(
            layers=by_fields(first_dense=1),
            correction_bias=True,
            shared=Shared(count=1, width=("shared_expert_intermediate_size",), width_is_total=True),
        ),
    ),
    Family(
        names=("cohere2_moe",),
        kinds=listed(otherwise=last_of("sliding_window_pattern", default=4)),
        dense=Dense(width=("prefix_dense_intermediate_size", "intermediate_size"), bias=False),
        norms=1,
        experts=Experts(
            width=("intermediate_size",),
            layers=by_fields(),
            shared=Shared(),
        ),
    ),
    Family(
        names=("hy_v3",),
        disagreement=shared_all_the_same("num_shared_experts"),
        mixers={"attention": Attention(qk_norm="head")},
        dense=Dense(bias="mlp_bias"),
        experts=Experts(
            width=("moe_intermediate_size", "expert_hidden_dim"),
            layers=by_fields(first_dense=1),
            shared=Shared(bias="mlp_bias"),
        ),
    ),
    Family(
        names=("solar_open",),
        mixers={"attention": Attention(o_bias=False)},
        dense=None,
        experts=Experts(
            layers=all_layers,
            shared=Shared(),
        ),
    ),
    Family(
        names=("mellum",),
        kinds=listed(otherwise=every("attention")),
        mixers={"attention": Attention(qk_norm="head")},
        experts=Experts(layers=by_fields()),
    ),
)
