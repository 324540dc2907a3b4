"""Counts multi-head latent attention, with the indexer and the gates that later families put beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_optimizer.inspection.attention import HEADS, KV_HEADS, MAX_HEADS
from moe_optimizer.inspection.config import Config, Names
from moe_optimizer.inspection.shapes import Mixer, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Keys and values are decompressed from one cached latent per token."""

    heads: Names = HEADS
    prefix: str = ""
    """Before the names of the ranks and head widths, for layers that have fields of their own."""
    bias: Names | bool = "attention_bias"
    indexer: bool = False
    """A sparse-attention indexer sits beside the attention, in the layers that do not share an earlier one's."""
    gate: Callable[[Config], str] | str = "none"
    """Output gate: "width" (one value for each channel), "head" (for each head) or "none"."""
    value_shares_hidden: bool = False
    """Where the file does not give a value head's width: the hidden size shared out among the heads."""
    sinks: bool = False
    """One learned logit for each query head."""
    copies: int = 1
    """Attention blocks in one decoder layer."""

    def __call__(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        heads = config.required(self.heads, maximum=MAX_HEADS)
        nope = config.required(f"{self.prefix}qk_nope_head_dim", minimum=0)
        rope = config.required((f"{self.prefix}qk_rope_head_dim", "qk_rope_head_dim"), minimum=0)
        value_field = f"{self.prefix}v_head_dim"
        shared_out = self.value_shares_hidden and config.get(value_field) is None
        value = hidden_size // heads if shared_out else config.required(value_field)
        latent = config.required(f"{self.prefix}kv_lora_rank")
        q_latent = config.integer(f"{self.prefix}q_lora_rank", 0) or 0
        bias = config.flag(self.bias)
        q_width = heads * (nope + rope)
        params = hidden_size * q_width
        if q_latent:
            params = hidden_size * q_latent + q_latent * bias + q_latent + q_latent * q_width
        down = hidden_size * (latent + rope) + (latent + rope) * bias + latent
        params += down + latent * heads * (nope + value)
        params += heads * value * hidden_size + hidden_size * bias
        gate = self.gate(config) if callable(self.gate) else self.gate
        params += hidden_size * heads * {"none": 0, "head": 1, "width": value}[gate]
        params += heads * self.sinks
        if self.indexer and _has_own_indexer(config, site.layer):
            params += _indexer_params(config, hidden_size, q_latent)
        return Mixer(
            kind="mla",
            params=params * self.copies,
            num_heads=heads,
            num_kv_heads=config.integer(KV_HEADS, heads, minimum=1, maximum=MAX_HEADS) or heads,
            head_dim=nope + rope,
            cache_elements=(latent + rope) * self.copies,
            window=site.window,
            kv_params=(down + hidden_size * q_latent + q_latent) * self.copies,
        )


def _indexer_params(config: Config, hidden_size: int, q_latent: int) -> int:
    """Query and key projections, the key's LayerNorm, a weight for each head, and the pooling of keys."""
    heads = config.integer("index_n_heads", 0) or 0
    width = config.integer("index_head_dim", 0) or 0
    pool = config.integer("index_kpool", 0) or 0
    params = q_latent * heads * width + hidden_size * width + 2 * width + hidden_size * heads
    return params + (pool * width + width * hidden_size if pool else 0)


def _has_own_indexer(config: Config, layer: int) -> bool:
    """Whether a layer chooses its tokens itself instead of reusing the last choice."""
    types = config.items("indexer_types")
    if types is not None:
        return layer >= len(types) or types[layer] == "full"
    choices = config.get("index_topk_pattern")
    if isinstance(choices, (str, list)):
        return layer >= len(choices) or choices[layer] not in ("S", "shared")
    frequency = config.integer("index_topk_freq", 1, minimum=1) or 1
    offset = config.integer("index_skip_topk_offset", 2) or 0
    return max(layer - offset + 1, 0) % frequency == 0
