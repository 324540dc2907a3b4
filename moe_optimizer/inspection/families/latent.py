"""Decoders with latent attention and more: choices shared between layers, gates, linear layers between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_optimizer.inspection.attention import Attention, sink_attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.families.common_parts import EXPERTS, hyper_head, pair_hyper, square_hyper
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.latent_attention import LatentAttention
from moe_optimizer.inspection.layer_rules import by_fields, every, indices, last_of, listed, where
from moe_optimizer.inspection.recurrent import KimiDeltaAttention

INDEXED_KINDS = {"indexed_attention": "attention", "full_attention": "attention", "linear_attention": "linear"}
GATES = {"headwise": "head", "head_wise": "head", "elementwise": "width", "element_wise": "width"}


def _gate(field: str, *, default: str) -> Callable[[Config], str]:
    """How wide an output gate is, by a field that names it."""
    return lambda config: GATES.get(config.text(field), default)


def _looks_back(config: Config) -> bool:
    """Whether parts choose among earlier blocks' outputs, with a norm and a row of weights for each choice."""
    return config.get("attn_res_block_size") is not None


def _last_of_each_group(config: Config, num_layers: int) -> tuple[str, ...]:
    """The last layer of each whole group is attention, and so are the layers after the last whole group."""
    group = config.required("layer_group_size")
    whole = num_layers // group * group
    return tuple("attention" if (i + 1) % group == 0 or i >= whole else "linear" for i in range(num_layers))


FAMILIES = (
    Family(
        names=("hy_v4",),
        mixers={"attention": LatentAttention(indexer=True, gate="width", sinks=True)},
        layer_extra=pair_hyper,
        model_extra=hyper_head,
        experts=replace(EXPERTS, layers=by_fields(first_dense=1)),
        defaults={"index_topk_freq": 4},
    ),
    Family(
        names=("glm5_next_text", "glm5_next"),
        kinds=listed(
            otherwise=last_of(otherwise="linear", default=4),
            names=INDEXED_KINDS,
        ),
        mixers={"attention": LatentAttention(indexer=True), "linear": KimiDeltaAttention()},
        layer_extra=square_hyper,
        experts=replace(EXPERTS, layers=by_fields(first_dense=3)),
    ),
    Family(
        names=("dots3_note",),
        kinds=listed(otherwise=every("attention")),
        mixers={
            "attention": LatentAttention(indexer=True, gate=_gate("attention_gate_type", default="width")),
            "sliding": LatentAttention(
                heads=("swa_num_attention_heads",),
                prefix="swa_",
                gate=_gate("swa_attention_gate_type", default="width"),
            ),
        },
        window=("sliding_window_size", "sliding_window"),
        experts=EXPERTS,
    ),
    Family(
        names=("pangu_ultra_moe",),
        mixers={"attention": LatentAttention(bias=False)},
        norms=lambda config: 4 if config.flag("sandwich_norm") else 2,
        experts=EXPERTS,
    ),
    Family(
        names=("pangu_pro_moe_v2",),
        mixers={"attention": sink_attention},
        norms=lambda config: 4 if config.flag("sandwich_norm") else 2,
        dense=Dense(bias="mlp_bias"),
        experts=EXPERTS,
    ),
    Family(
        names=("bailing_hybrid_v3", "bailing_moe_v3"),
        kinds=_last_of_each_group,
        mixers={
            "attention": LatentAttention(
                bias=False, gate=_gate("gated_attention_proj_granularity_type", default="none")
            ),
            "linear": KimiDeltaAttention(
                heads=("num_attention_heads",), head_dim=("head_dim",), kernel=("short_conv_kernel_size",)
            ),
        },
        dense=Dense(bias="use_bias"),
        experts=Experts(
            layers=by_fields(),
            shared=Shared(width=("moe_shared_expert_intermediate_size",)),
        ),
        defaults={"short_conv_kernel_size": 4},
    ),
    Family(
        names=("kimi_linear",),
        kinds=listed(
            otherwise=where(indices("linear_attn_config.full_attn_layers", first=1), "attention", otherwise="linear")
        ),
        mixers={
            "attention": LatentAttention(
                gate=lambda config: "width" if config.flag("mla_use_output_gate") else "none",
            ),
            "linear": KimiDeltaAttention(),
        },
        layer_extra=lambda site: 4 * site.hidden_size * _looks_back(site.config),
        model_extra=lambda config, hidden_size: 2 * hidden_size * _looks_back(config),
        experts=replace(EXPERTS, latent=("routed_expert_hidden_size",), latent_norm="latent_moe_use_norm"),
    ),
    Family(
        names=("k2_horizon",),
        mixers={
            "attention": Attention(
                qk_norm="each_head",
                qk_norm_when="query_key_norm",
                gate=lambda config: "width" if config.get("attention_gate_func") is not None else "none",
            )
        },
        experts=replace(EXPERTS, router_bias="moe_gate_bias"),
    ),
)
