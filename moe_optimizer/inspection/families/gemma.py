"""Gemma: four norms a layer from the second on, windowed and full layers; then per-layer embeddings and experts."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts
from moe_optimizer.inspection.layer_rules import KindRule, last_of, listed
from moe_optimizer.inspection.shapes import Site


def _with_borrowing(rule: KindRule) -> KindRule:
    """The last layers, as many as the file says, use the caches of earlier ones."""

    def kinds(config: Config, num_layers: int) -> tuple[str, ...]:
        first = num_layers - (config.integer("num_kv_shared_layers", 0) or 0)
        borrows = 0 < first < num_layers
        own = rule(config, num_layers)
        return tuple(f"{kind}_borrowing" if borrows and i >= first else kind for i, kind in enumerate(own))

    return kinds


def _ends_full(rule: KindRule) -> KindRule:
    """The last layer sees everything, whatever the pattern says."""
    return lambda config, num_layers: (*rule(config, num_layers)[:-1], "attention")


def _gemma3n_layer(site: Site) -> int:
    """Alternating updates, the low-rank residual, the per-layer input, and four norms of their own."""
    config, hidden_size = site.config, site.hidden_size
    streams, rank = config.required("altup_num_inputs"), config.required("laurel_rank")
    per_layer = config.required("hidden_size_per_layer_input")
    alternating = streams**2 + streams**3 + hidden_size * streams + 2 * hidden_size
    return alternating + 2 * hidden_size * rank + hidden_size + 2 * hidden_size * per_layer + hidden_size


def _gemma3n_model(config: Config, hidden_size: int) -> int:
    """Projections of the per-layer embeddings and of the alternating streams."""
    per_layer = config.required("hidden_size_per_layer_input")
    streams = config.required("altup_num_inputs")
    width = config.required("num_hidden_layers") * per_layer
    return hidden_size * width + per_layer + 2 * (streams - 1) * hidden_size * hidden_size


def _per_layer_embedding(config: Config) -> int:
    """The embedding table that feeds every layer."""
    per_layer = config.integer("hidden_size_per_layer_input", 0) or 0
    rows = config.integer("vocab_size_per_layer_input") or config.required("vocab_size")
    return rows * config.required("num_hidden_layers") * per_layer


def _gemma4_layer(site: Site) -> int:
    """The per-layer input, and beside experts three more norms."""
    config, hidden_size = site.config, site.hidden_size
    per_layer = config.integer("hidden_size_per_layer_input", 0) or 0
    params = 2 * hidden_size * per_layer + hidden_size if per_layer else 0
    return params + 3 * hidden_size * _has_experts(config)


def _gemma4_model(config: Config, hidden_size: int) -> int:
    per_layer = config.integer("hidden_size_per_layer_input", 0) or 0
    return (hidden_size * config.required("num_hidden_layers") * per_layer) + per_layer


def _has_experts(config: Config) -> bool:
    return config.flag("enable_moe_block") and (config.integer("num_experts", 0) or 0) > 0


def _double_wide(config: Config, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Layers that borrow a cache may have feed-forward parts of twice the width."""
    shared = config.integer("num_kv_shared_layers", 0) or 0
    if not config.flag("use_double_wide_mlp") or not 0 < shared < len(widths):
        return widths
    first = len(widths) - shared
    return tuple(2 * width if i >= first else width for i, width in enumerate(widths))


def _global_kv_heads(config: Config, heads: int) -> int:
    """Full layers have key/value heads of their own only where keys serve as values."""
    own = ("num_global_key_value_heads", "num_key_value_heads")
    names = own if config.flag("attention_k_eq_v") else own[1:]
    return config.integer(names, heads, minimum=1) or heads


def _gemma(*, borrows: bool, full: bool) -> Attention:
    """Gemma 4's windowed and full layers, with caches of their own or borrowed ones."""
    return Attention(
        qk_norm="head",
        kv_heads=_global_kv_heads if full else ("num_key_value_heads",),
        head_dim=("global_head_dim",) if full else ("head_dim",),
        shares_key_as_value="attention_k_eq_v" if full else False,
        borrows_cache=borrows,
    )


FAMILIES = (
    Family(names=("gemma",)),
    Family(
        names=("gemma2",),
        kinds=listed(otherwise=last_of(default=2)),
        norms=4,
    ),
    Family(
        names=("vaultgemma",),
        kinds=listed(otherwise=last_of(default=2)),
    ),
    Family(
        names=("gemma3_text", "gemma3", "Rnj1ForCausalLM"),
        kinds=listed(otherwise=last_of(("sliding_window_pattern", "_sliding_window_pattern"), default=6)),
        mixers={"attention": Attention(qk_norm="head")},
        norms=4,
    ),
    Family(
        names=("gemma3n_text", "gemma3n"),
        kinds=_with_borrowing(listed(otherwise=last_of(default=5))),
        mixers={
            "attention": Attention(qk_norm="head"),
            "attention_borrowing": Attention(qk_norm="head", borrows_cache=True),
            "sliding_borrowing": Attention(qk_norm="head", borrows_cache=True),
        },
        norms=4,
        layer_extra=_gemma3n_layer,
        model_extra=_gemma3n_model,
        extra_embeddings=_per_layer_embedding,
    ),
    Family(
        names=("gemma4_text", "gemma4", "gemma4_unified_text", "diffusion_gemma_text"),
        kinds=_with_borrowing(_ends_full(listed(otherwise=last_of(default=6)))),
        mixers={
            "attention": _gemma(borrows=False, full=True),
            "sliding": _gemma(borrows=False, full=False),
            "attention_borrowing": _gemma(borrows=True, full=True),
            "sliding_borrowing": _gemma(borrows=True, full=False),
        },
        norms=4,
        dense=Dense(bias=False, adjust=_double_wide),
        layer_extra=_gemma4_layer,
        model_extra=_gemma4_model,
        extra_embeddings=_per_layer_embedding,
        experts=Experts(
            width=("moe_intermediate_size", "expert_intermediate_size"),
            layers=lambda config, num_layers: (_has_experts(config),) * num_layers,
            dense_beside=True,
            router_scales=True,
            modules=("experts.0.up_proj", "moe.experts.0.up_proj"),
        ),
        defaults={"global_head_dim": 512},
    ),
)
