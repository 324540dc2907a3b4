"""Dense decoders with layer norms, most of them with learned or ALiBi positions and biases."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.families.common_parts import BIASED, BIASED_NORMED, NO_BIAS
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense

WIDE_MLP = Dense(gated=False, bias=True, multiple_of_hidden=4)


def _one_if_multi_query(config: Config, heads: int) -> int:
    return 1 if config.flag("multi_query") else heads


def _falcon_kv_heads(config: Config, heads: int) -> int:
    if not config.flag("new_decoder_architecture"):
        return _one_if_multi_query(config, heads)
    return config.integer(("num_kv_heads", "n_head_kv"), heads, minimum=1) or heads


def _falcon_norms(config: Config) -> int:
    """Attention and feed-forward side by side share one norm, except where the file asks for two."""
    if config.flag("new_decoder_architecture"):
        return config.integer("num_ln_in_parallel_attn", 2, minimum=1) or 2
    return 1 if config.flag("parallel_attn") else 2


def _opt_tables(config: Config) -> int:
    """Two further positions, less what the embedding table is smaller by when its vectors are narrower."""
    hidden_size = config.required("hidden_size")
    narrow = config.integer("word_embed_proj_dim", hidden_size, minimum=1, maximum=hidden_size) or hidden_size
    return config.required("vocab_size") * (narrow - hidden_size) + 2 * hidden_size


def _opt_projections(config: Config, hidden_size: int) -> int:
    """Projections between embeddings and layers; without norms before the parts there is no last norm."""
    narrow = config.integer("word_embed_proj_dim", hidden_size, minimum=1, maximum=hidden_size) or hidden_size
    projections = 2 * hidden_size * narrow if narrow != hidden_size else 0
    has_last_norm = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm")
    return projections - (0 if has_last_norm else 2 * hidden_size)


FAMILIES = (
    Family(
        names=("gpt2", "gpt_bigcode", "GPT2LMHeadModel"),
        mixers={"attention": Attention(kv_heads=_one_if_multi_query, qkv_bias=True, o_bias=True)},
        dense=WIDE_MLP,
        norm="layer",
        positions=("n_positions", "max_position_embeddings"),
    ),
    Family(
        names=("gptj", "codegen"),
        mixers={"attention": NO_BIAS},
        dense=WIDE_MLP,
        norms=1,
        norm="layer",
        head_bias=True,
    ),
    Family(
        names=("gpt_neo",),
        mixers={"attention": Attention(qkv_bias=False, o_bias=True)},
        dense=WIDE_MLP,
        norm="layer",
        positions=("max_position_embeddings",),
    ),
    Family(
        names=("gpt_neox",),
        dense=WIDE_MLP,
        norm="layer",
    ),
    Family(
        names=("opt",),
        mixers={"attention": Attention(qkv_bias="enable_bias", o_bias="enable_bias")},
        dense=Dense(gated=False, bias="enable_bias"),
        norm="layer",
        positions=("max_position_embeddings",),
        model_extra=_opt_projections,
        extra_embeddings=_opt_tables,
    ),
    Family(
        names=("bloom",),
        mixers={"attention": BIASED},
        dense=WIDE_MLP,
        norm="layer",
        embedding_norm=True,
    ),
    Family(
        names=("falcon", "RefinedWeb", "RefinedWebModel"),
        mixers={"attention": Attention(kv_heads=_falcon_kv_heads, qkv_bias="bias", o_bias="bias")},
        dense=Dense(gated=False, bias="bias", multiple_of_hidden=4),
        norms=_falcon_norms,
        norm="layer",
    ),
    Family(
        names=("mpt",),
        mixers={"attention": NO_BIAS},
        dense=Dense(width=(), gated=False, bias=False, multiple_of_hidden=4),
    ),
    Family(
        names=("persimmon",),
        mixers={"attention": BIASED_NORMED},
        dense=Dense(gated=False, bias=True),
        norm="layer",
    ),
)
