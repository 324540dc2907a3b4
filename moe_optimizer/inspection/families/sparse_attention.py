"""Decoders whose attention compresses, chooses, factorises or routes."""

from __future__ import annotations

from dataclasses import replace

from moe_optimizer.inspection.attention import MAX_HEADS, Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.disagreements import shared_all_the_same
from moe_optimizer.inspection.families.common_parts import HEAD_NORMED, hyper_head, square_hyper
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.layer_rules import by_fields, every, last_of, listed, numbered
from moe_optimizer.inspection.shapes import Mixer, Site


def compressed_attention(site: Site) -> Mixer:
    """One shared key/value head with a low-rank query and a grouped low-rank output.

    Beside the window a layer may keep compressed entries: one for `ratio` tokens, chosen by an indexer when the
    ratio is small. The ratio comes from compress_ratios or layer_types.
    """
    config, hidden_size = site.config, site.hidden_size
    heads = config.required("num_attention_heads", maximum=MAX_HEADS)
    head_dim, q_rank = config.required("head_dim"), config.required("q_lora_rank")
    groups, o_rank = config.required("o_groups"), config.required("o_lora_rank")
    kv_params = hidden_size * head_dim + head_dim
    params = hidden_size * q_rank + q_rank + q_rank * heads * head_dim + kv_params + heads
    params += o_rank * heads * head_dim + groups * o_rank * hidden_size
    ratio, indexed = _compression(config, site.layer)
    if ratio:
        params += _compressor(hidden_size, head_dim, ratio, overlapping=indexed)
    if indexed:
        index_heads, index_dim = config.required("index_n_heads"), config.required("index_head_dim")
        params += _compressor(hidden_size, index_dim, ratio, overlapping=True)
        params += q_rank * index_heads * index_dim + hidden_size * index_heads
    return Mixer(
        kind="mla",
        params=params,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        cache_elements=head_dim // ratio if ratio else head_dim,
        window=None if ratio else site.window,
        kv_params=kv_params,
    )


def _compressor(hidden_size: int, width: int, ratio: int, *, overlapping: bool) -> int:
    """Key/value and gate projections, a bias for each position of the group, and a norm."""
    wide = 2 * width if overlapping else width
    return 2 * hidden_size * wide + ratio * wide + width


def _compression(config: Config, layer: int) -> tuple[int, bool]:
    """Return a layer's compression ratio (0: none) and whether an indexer chooses among the entries."""
    ratios = config.integers("compress_ratios")
    if ratios is not None:
        if layer >= len(ratios):
            raise config.error("compress_ratios", f"{len(ratios)} entries", f"one for layer {layer}")
        return ratios[layer], 0 < ratios[layer] < 128
    types = config.items("layer_types")
    word = types[layer] if types is not None and layer < len(types) else None
    if types is None:
        word = "compressed_sparse_attention" if layer >= 2 and layer % 2 else "heavily_compressed_attention"
    if word == "sliding_attention":
        return 0, False
    indexed = word == "compressed_sparse_attention"
    default = 4 if indexed else 128
    return config.integer(f"compress_rates.{word}", default, minimum=1) or default, indexed


def routed_attention(site: Site) -> Mixer:
    """Query and output projections are experts; keys and values are shared by all of them."""
    config, hidden_size = site.config, site.hidden_size
    kv_heads = config.required("num_key_value_heads", maximum=MAX_HEADS)
    head_dim = config.required(("kv_channels", "head_dim"))
    experts = config.required(("num_local_experts", "moe_num_experts"))
    top_k = config.required(("num_experts_per_tok", "moe_top_k"), maximum=experts)
    width = kv_heads * head_dim
    expert = 2 * hidden_size * width
    kv_params = hidden_size * 2 * width
    return Mixer(
        params=experts * expert + hidden_size + hidden_size * experts + kv_params,
        expert_params=experts * expert,
        idle_params=(experts - top_k) * expert,
        num_heads=config.integer("num_attention_heads", kv_heads * top_k, minimum=1) or kv_heads * top_k,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        cache_elements=2 * width,
        window=site.window,
        kv_params=kv_params,
    )


def factorized_attention(site: Site) -> Mixer:
    """A low-rank query with a norm, and one key and one value head for all query heads."""
    config, hidden_size = site.config, site.hidden_size
    heads = config.required("num_attention_heads", maximum=MAX_HEADS)
    head_dim = config.required("head_dim")
    rank = config.integer("share_q_dim", 0) or head_dim
    kv_params = hidden_size * 2 * head_dim
    params = hidden_size * rank + rank + rank * heads * head_dim + kv_params + heads * head_dim * hidden_size
    return Mixer(
        params=params,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        cache_elements=2 * head_dim,
        window=site.window,
        kv_params=kv_params,
    )


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
        names=("deepseek_v4", "deepseek_ref", "DeepseekV4ForConditionalGeneration"),
        disagreement=shared_all_the_same("n_shared_experts"),
        kinds=every("sliding"),
        mixers={"sliding": compressed_attention},
        dense=None,
        layer_extra=square_hyper,
        model_extra=hyper_head,
        experts=Experts(
            shared=Shared(),
        ),
    ),
    Family(
        names=("minimax_m3", "minimax_m3_vl_text", "MiniMaxM3SparseForCausalLM"),
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
        names=("step3_text",),
        mixers={"attention": factorized_attention},
        experts=STEP_EXPERTS,
    ),
    Family(
        names=("step3p5", "step3p7", "Step3p7FlashForCausalLM"),
        kinds=listed(otherwise=last_of(default=2)),
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
        names=("jetmoe",),
        mixers={"attention": routed_attention},
        dense=None,
        layer_extra=lambda site: site.hidden_size,  # a bias on the experts' sum
        experts=Experts(
            width=("intermediate_size", "ffn_hidden_size"),
            one_is_dense=False,
        ),
    ),
)
