"""Decoders with ordinary attention and experts in all layers, in every n-th, or after the first."""

from __future__ import annotations

from dataclasses import replace

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.disagreements import bias_ignored, interleaving_listed
from moe_optimizer.inspection.families.common_parts import EXPERTS, GRANITE_EXPERTS, HEAD_NORMED, NO_BIAS
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.layer_rules import (
    after_first,
    by_fields,
    every,
    last_of,
    listed,
    numbered,
    sparse_step,
    windowed,
)
from moe_optimizer.inspection.recurrent import LightningAttention
from moe_optimizer.inspection.shapes import Site

HUNYUAN_ATTENTION = Attention(qk_norm="head", qk_norm_when="use_qk_norm")


def _arctic_residual(site: Site) -> int:
    """A dense residual branch beside the experts: a gated layer as wide as the hidden size, and its norm."""
    step = site.config.integer("moe_layer_frequency", 1) or 1
    wanted = site.config.flag("parallel_attn_mlp_res") and (site.layer + 1) % step == 0
    return (3 * site.hidden_size * site.hidden_size + site.hidden_size) * wanted


def _cache_sharing(config: Config, num_layers: int) -> tuple[str, ...]:
    """With cross-layer attention only the first layer of each group makes keys and values."""
    factor = (config.integer("cla_share_factor", 1) or 1) if config.flag("use_cla") else 1
    return tuple("attention" if i % factor == 0 else "borrowing" for i in range(num_layers))


FAMILIES = (
    Family(
        names=("mixtral", "QuantMixtralForCausalLM"),
        kinds=windowed(),
        mixers={"attention": NO_BIAS},
        experts=Experts(width=("intermediate_size",)),
    ),
    Family(
        names=("olmoe", "flex_olmo"),
        mixers={"attention": Attention(qk_norm="width")},
        experts=Experts(width=("intermediate_size",)),
    ),
    Family(
        names=("phimoe",),
        kinds=windowed(),
        norm="layer",
        head_bias="lm_head_bias",
        experts=Experts(width=("intermediate_size",)),
    ),
    Family(
        names=("granitemoe",),
        experts=Experts(width=("intermediate_size",)),
    ),
    Family(
        names=("granitemoeshared",),
        experts=GRANITE_EXPERTS,
    ),
    Family(
        names=("granitemoe_swa",),
        kinds=listed(otherwise=every("attention")),
        mixers={"attention": Attention(sinks=True)},
        experts=GRANITE_EXPERTS,
    ),
    Family(
        names=("gpt_oss",),
        kinds=listed(otherwise=last_of(default=2)),
        mixers={"attention": Attention(sinks=True)},
        experts=Experts(
            width=("intermediate_size",),
            bias=True,
            router_bias=True,
        ),
    ),
    Family(
        names=("dbrx",),
        mixers={"attention": Attention(kv_heads=("attn_config.kv_n_heads",), qkv_bias=False, o_bias=False)},
        dense=None,
        experts=Experts(
            width=("ffn_config.ffn_hidden_size",),
            default_top_k=1,
            one_is_dense=False,
        ),
    ),
    Family(
        names=("minimax", "minimax_text_01", "minimax_m1", "MiniMaxText01", "MiniMaxM1"),
        kinds=listed(
            otherwise=numbered(
                "attn_type_list",
                {0: "linear", 1: "attention"},
                otherwise=last_of((), "linear", otherwise="attention", default=2),
            )
        ),
        mixers={"attention": NO_BIAS, "linear": LightningAttention()},
        experts=GRANITE_EXPERTS,
    ),
    Family(
        names=("minimax_m2",),
        mixers={"attention": Attention(qkv_bias=False, o_bias=False, qk_norm="width", qk_norm_when="use_qk_norm")},
        experts=Experts(width=("intermediate_size",)),
        defaults={"use_qk_norm": True},
    ),
    Family(
        names=("arctic",),
        layer_extra=_arctic_residual,
        experts=Experts(
            width=("intermediate_size",),
            layers=sparse_step("moe_layer_frequency", default=2),
        ),
    ),
    Family(
        names=("grok-1", "grok1", "grok_1", "Grok1ModelForCausalLM"),
        mixers={"attention": NO_BIAS},
        norms=4,
        dense=Dense(width=("intermediate_size",)),
        experts=Experts(
            width=("moe_intermediate_size", "intermediate_size"),
            dense_beside="residual_moe",
        ),
        defaults={"tie_word_embeddings": True},
    ),
    Family(
        names=("afmoe",),
        disagreement=bias_ignored("attention_bias"),
        kinds=listed(otherwise=last_of("global_attn_every_n_layers")),
        mixers={"attention": Attention(qkv_bias=False, o_bias=False, qk_norm="head", gate="width")},
        norms=4,
        experts=Experts(
            layers=by_fields(),
            correction_bias=True,
            shared=Shared(),
        ),
    ),
    Family(
        names=("llama4_text", "llama4"),
        disagreement=interleaving_listed,
        kinds=listed(
            otherwise=numbered(
                "no_rope_layers",
                {1: "chunked", 0: "attention"},
                otherwise=last_of("no_rope_layer_interval", "attention", otherwise="chunked", default=4),
            )
        ),
        dense=Dense(width=("intermediate_size_mlp",), bias=False),
        experts=Experts(
            width=("intermediate_size",),
            layers=by_fields(),
            shared=Shared(count=1),
        ),
    ),
    Family(
        names=("exaone_moe",),
        kinds=listed(otherwise=last_of("sliding_window_pattern", default=4)),
        mixers={"attention": HEAD_NORMED},
        experts=EXPERTS,
    ),
    Family(
        names=("aria_text",),
        experts=Experts(
            width=("intermediate_size", "moe_intermediate_size"),
            shared=Shared(bias="mlp_bias"),
        ),
    ),
    Family(
        names=("minicpm",),
        mixers={"attention": NO_BIAS},
        experts=Experts(width=("intermediate_size",)),
        defaults={"tie_word_embeddings": True},
    ),
    Family(
        names=("skywork_moe", "SkyworkForCausalLM"),
        mixers={"attention": NO_BIAS},
        experts=Experts(
            width=("intermediate_size",),
            arrays=True,
        ),
    ),
    Family(
        names=("xverse", "XverseMoeForCausalLM"),
        mixers={"attention": NO_BIAS},
        experts=Experts(
            width=("intermediate_size",),
            shared=Shared(),
        ),
    ),
    Family(
        names=("moondream3_text", "moondream3", "HfMoondream"),
        mixers={"attention": Attention(heads=("n_heads",), kv_heads=("n_kv_heads",), qkv_bias=True, o_bias=True)},
        dense=Dense(width=("ff_dim",), gated=False, bias=True),
        norm="layer",
        norms=1,
        head_bias=True,
        experts=Experts(
            count=("moe.n_experts", "moe_num_experts"),
            top_k=("moe.n_experts_per_tok", "moe_experts_per_token"),
            width=("moe.expert_inner_dim", "moe_expert_inner_dim"),
            layers=after_first(("moe.start_layer", "moe_start_layer")),
            router_bias=True,
        ),
        # The published file names the class and no size at all; every model of this class has these experts.
        defaults={
            "dim": 2048,
            "ff_dim": 8192,
            "n_layers": 24,
            "n_heads": 32,
            "n_kv_heads": 32,
            "vocab_size": 51200,
            "max_context": 4096,
            "moe_start_layer": 4,
            "moe_num_experts": 64,
            "moe_experts_per_token": 8,
            "moe_expert_inner_dim": 1024,
            "tie_word_embeddings": False,
        },
    ),
    Family(
        names=("hunyuan_v1_moe", "hunyuan", "hunyuan_moe", "HunYuanMoEV1ForCausalLM"),
        kinds=_cache_sharing,
        mixers={"attention": HUNYUAN_ATTENTION, "borrowing": replace(HUNYUAN_ATTENTION, borrows_cache=True)},
        experts=Experts(
            width=("moe_intermediate_size", "intermediate_size"),
            layers=after_first("moe_layer_num_skipped"),
            arrays=True,
            shared=Shared(),
        ),
        defaults={"use_qk_norm": True, "num_shared_expert": 1},
    ),
)
