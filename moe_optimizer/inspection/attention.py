"""Counts attention layers: their fields, parameters and cache elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moe_optimizer.inspection.config import Config, Names
from moe_optimizer.inspection.shapes import Mixer, Site

HIDDEN: Names = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
HEADS: Names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS: Names = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups")
HEAD_DIM: Names = ("head_dim", "attention_head_dim", "hidden_size_per_head", "kv_channels")
MAX_HEADS = 1 << 16
_SINK_BIAS = ("attention_bias", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head, grouped or multi-query attention."""

    heads: Names = HEADS
    kv_heads: Names | Callable[[Config, int], int] = KV_HEADS
    """Absent in the file: as many as query heads. A function gets the configuration and the query heads."""
    head_dim: Names = HEAD_DIM
    """Absent in the file: hidden size over heads."""
    value_dim: Names = ()
    """Width of a value head where it differs from the query's."""
    qkv_bias: Names | bool = "attention_bias"
    """On when one of the fields is."""
    o_bias: Names | bool = "attention_bias"
    qk_norm: Literal["none", "head", "width", "each_head"] = "none"
    """head: one weight vector of head_dim for all query heads and one for all key heads; width: over all heads
    together; each_head: a vector for each head."""
    qk_norm_when: Names | bool = True
    qk_norm_bias: bool = False
    gate: str | Callable[[Config], str] = "none"
    """Output gate computed from the layer's input: "width" (one value for each channel), "head" (for each head)
    or "none"."""
    gate_when: Names | bool = True
    gate_bias: Names | bool = False
    sinks: Names | bool = False
    """One learned logit for each query head."""
    shares_key_as_value: Names | bool = False
    """No value projection: the key projection's output is used."""
    indexer_heads: Names = ()
    """Heads of an indexer with its own query and (one) key projection, each with a norm; empty: none."""
    indexer_dim: Names = ()
    borrows_cache: bool = False
    """Uses an earlier layer's keys and values: no projections for them, nothing cached."""

    def __call__(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        heads = self._heads(config, site.layer)
        if callable(self.kv_heads):
            kv_heads = self.kv_heads(config, heads)
        else:
            kv_heads = config.integer(self.kv_heads, heads, minimum=1, maximum=MAX_HEADS) or heads
            if heads % kv_heads:
                # Every loader ends there: a key/value head belongs to a whole number of query heads.
                raise config.error(config.name_of(self.kv_heads), kv_heads, f"a divisor of the {heads} query heads")
        head_dim = config.integer(self.head_dim, 0) or hidden_size // heads
        if not head_dim:
            raise config.error(config.name_of(self.heads), heads, f"at most the hidden size {hidden_size}")
        value_dim = config.integer(self.value_dim, head_dim, minimum=1) or head_dim
        q, k, v = heads * head_dim, kv_heads * head_dim, kv_heads * value_dim
        o_in = heads * value_dim
        projected_v = 0 if config.flag(self.shares_key_as_value) else v
        qkv_bias = config.any_flag(self.qkv_bias)
        kv_params = (hidden_size + qkv_bias) * (k + projected_v)
        params = (hidden_size + qkv_bias) * q + kv_params
        params += o_in * hidden_size + hidden_size * config.any_flag(self.o_bias)
        if self.borrows_cache:
            params, kv_params = params - kv_params, 0
        norms = self._norms(config, q, k, head_dim)
        params += norms
        gate = self.gate(config) if callable(self.gate) else self.gate
        if gate != "none" and config.flag(self.gate_when):
            gate_width = o_in if gate == "width" else heads
            params += hidden_size * gate_width + gate_width * config.any_flag(self.gate_bias)
        params += heads * config.flag(self.sinks)
        if self.indexer_heads:
            index_dim = config.required(self.indexer_dim)
            params += hidden_size * index_dim * (config.required(self.indexer_heads) + 1) + 2 * index_dim
        return Mixer(
            params=params,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            has_head_norms=self.qk_norm == "head" and norms > 0,
            cache_elements=0 if self.borrows_cache else k + v,
            window=site.window,
            kv_params=kv_params,
        )

    def _heads(self, config: Config, layer: int) -> int:
        """Return the query heads: a number for all layers, or the layer's entry of an array."""
        value = config.get(self.heads)
        if isinstance(value, list):
            counts = config.integers(self.heads, minimum=1, maximum=MAX_HEADS) or ()
            if layer >= len(counts):
                raise config.error(config.name_of(self.heads), f"{len(counts)} entries", f"one for layer {layer}")
            return counts[layer]
        return config.required(self.heads, maximum=MAX_HEADS)

    def _norms(self, config: Config, q: int, k: int, head_dim: int) -> int:
        if self.qk_norm == "none" or not config.flag(self.qk_norm_when):
            return 0
        keys = not self.borrows_cache
        width = head_dim * (1 + keys) if self.qk_norm == "head" else q + k * keys
        return width * (2 if self.qk_norm_bias else 1)


def sink_attention(site: Site) -> Mixer:
    """Pangu's: only keys are normalised, and every head has keys (and may have values) of its own for the sinks."""
    config, hidden_size = site.config, site.hidden_size
    heads = config.required("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = config.integer(KV_HEADS, heads, minimum=1, maximum=MAX_HEADS) or heads
    head_dim = config.required("qk_nope_dim") + config.required("qk_rope_dim")
    value_dim = config.required("v_channels")
    q, k, v = heads * head_dim, kv_heads * head_dim, kv_heads * value_dim
    bias = config.flag("qkv_bias") if config.has("qkv_bias") else config.any_flag(_SINK_BIAS)
    kv_params = (hidden_size + bias) * (k + v)
    params = (hidden_size + bias) * q + kv_params + head_dim
    params += heads * value_dim * hidden_size + hidden_size * config.any_flag(_SINK_BIAS)
    sinks = config.integer("param_sink_number", 0) or 0
    params += sinks * (k + v * config.flag("param_sink_with_value"))
    return Mixer(
        params=params,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        cache_elements=k + v,
        window=site.window,
        kv_params=kv_params,
    )
