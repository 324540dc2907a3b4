"""Counts attention of compressed, routed or factorised kinds."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.inspection.attention import MAX_HEADS
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.shapes import Mixer, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """One shared key/value head with a low-rank query and a grouped low-rank output.

    Beside the window a layer may keep compressed entries: one for `ratio` tokens, chosen by an indexer when the
    ratio is small.
    """

    def shape(self, site: Site) -> Mixer:
        """Return the layer's shape; its ratio comes from compress_ratios or layer_types."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedAttention:
    """Query and output projections are experts; keys and values are shared by all of them."""

    def shape(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        kv_heads = config.required("num_key_value_heads", maximum=MAX_HEADS)
        head_dim = config.required(("kv_channels", "head_dim"))
        experts = config.required(("num_local_experts", "moe_num_experts"))
        top_k = config.required(("num_experts_per_tok", "moe_top_k"), maximum=experts)
        width = kv_heads * head_dim
        expert = 2 * hidden_size * width
        kv_params = hidden_size * 2 * width
        return Mixer(
            kind="attention",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorizedAttention:
    """A low-rank query with a norm, and one key and one value head for all query heads."""

    def shape(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        heads = config.required("num_attention_heads", maximum=MAX_HEADS)
        head_dim = config.required("head_dim")
        rank = config.integer("share_q_dim", 0) or head_dim
        kv_params = hidden_size * 2 * head_dim
        params = hidden_size * rank + rank + rank * heads * head_dim + kv_params + heads * head_dim * hidden_size
        return Mixer(
            kind="attention",
            params=params,
            num_heads=heads,
            num_kv_heads=1,
            head_dim=head_dim,
            cache_elements=2 * head_dim,
            window=site.window,
            kv_params=kv_params,
        )
