"""DeepSeek, and decoders with its experts: dense first layers, latent or grouped attention."""

from __future__ import annotations

from dataclasses import replace

from moe_optimizer.inspection.attention import HIDDEN, Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.disagreements import all_of, bias_ignored, frequency_ignored, zero_experts
from moe_optimizer.inspection.families.common_parts import EXPERTS
from moe_optimizer.inspection.family import VOCAB, Family
from moe_optimizer.inspection.feed_forward import Dense, Experts
from moe_optimizer.inspection.latent_attention import LatentAttention
from moe_optimizer.inspection.layer_rules import after_first
from moe_optimizer.inspection.shapes import Site


def _norm_after_experts(site: Site) -> int:
    """Expert layers have one more norm."""
    return site.hidden_size * (site.layer >= (site.config.integer("first_k_dense_replace", 0) or 0))


def _latent_or_plain(config: Config, num_layers: int) -> tuple[str, ...]:
    """Small models of this family have ordinary attention: both parts of the latent query head are 0 wide."""
    plain = config.get("qk_nope_head_dim") == 0 and config.get("qk_rope_head_dim") == 0
    return ("plain" if plain else "attention",) * num_layers


def _ngram_tables(config: Config) -> int:
    """Tables for hashed sequences of tokens, each a little longer than the one before."""
    tables = _num_ngram_tables(config)
    if not tables:
        return 0
    rows = tables * config.required("ngram_vocab_size_ratio") * config.required(VOCAB) + tables * tables
    return rows * (config.required(HIDDEN) // tables)


def _ngram_projections(config: Config, hidden_size: int) -> int:
    tables = _num_ngram_tables(config)
    return tables * (hidden_size // tables) * hidden_size if tables else 0


def _num_ngram_tables(config: Config) -> int:
    if not config.integer("ngram_vocab_size_ratio", 0):
        return 0
    lengths = config.required("emb_neighbor_num", minimum=2, maximum=64) - 1
    return config.required("emb_split_num", maximum=1024) * lengths


DEEPSEEK_V3 = Family(
    names=("deepseek_v3", "kimi_k2", "mistral_large_3"),
    disagreement=frequency_ignored,
    kinds=_latent_or_plain,
    mixers={"attention": LatentAttention(), "plain": Attention(head_dim=())},
    experts=EXPERTS,
)

FAMILIES = (
    Family(
        names=("deepseek",),
        disagreement=frequency_ignored,
        experts=EXPERTS,
    ),
    replace(
        DEEPSEEK_V3,
        names=("deepseek_v2",),
        disagreement=all_of(frequency_ignored, bias_ignored("mlp_bias")),
    ),
    DEEPSEEK_V3,
    Family(
        names=("mistral4",),
        mixers={"attention": LatentAttention()},
        experts=EXPERTS,
    ),
    Family(
        names=("deepseek_v32",),
        disagreement=frequency_ignored,
        mixers={"attention": LatentAttention(indexer=True)},
        experts=EXPERTS,
    ),
    Family(
        names=("glm_moe_dsa",),
        mixers={"attention": LatentAttention(indexer=True)},
        experts=EXPERTS,
    ),
    Family(
        names=("glm4_moe_lite",),
        mixers={"attention": LatentAttention()},
        experts=EXPERTS,
        defaults={"first_k_dense_replace": 1},
    ),
    Family(
        names=("axk1",),
        disagreement=lambda _: "vLLM has a norm after the experts of each layer, transformers has none",
        mixers={"attention": LatentAttention()},
        layer_extra=_norm_after_experts,
        experts=EXPERTS,
    ),
    Family(
        names=("youtu",),
        mixers={"attention": LatentAttention()},
    ),
    Family(
        names=("minicpm3",),
        mixers={"attention": LatentAttention(value_shares_hidden=True)},
    ),
    Family(
        names=("longcat_flash", "longcat_flash_ngram"),
        disagreement=zero_experts,
        extra_embeddings=_ngram_tables,
        model_extra=_ngram_projections,
        layers=("num_layers", "num_hidden_layers"),
        mixers={"attention": LatentAttention(copies=2)},
        dense=Dense(width=("ffn_hidden_size", "intermediate_size"), bias=False, copies=2),
        norms=4,
        experts=Experts(
            width=("expert_ffn_hidden_size", "moe_intermediate_size"),
            router_bias="router_bias",
            zero_experts=("zero_expert_num",),
            dense_beside=True,
        ),
    ),
    Family(
        names=("glm4_moe", "glm4v_moe_text"),
        mixers={"attention": Attention(o_bias=False, qk_norm="head", qk_norm_when="use_qk_norm")},
        experts=replace(EXPERTS, layers=after_first("first_k_dense_replace")),
    ),
    Family(
        names=("dots1",),
        mixers={"attention": Attention(qk_norm="head")},
        experts=replace(EXPERTS, layers=after_first("first_k_dense_replace")),
    ),
)
