"""Grouped attention over learned sink tokens, with keys of two parts and values of a width of their own."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.inspection.attention import KV_HEADS, MAX_HEADS
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.shapes import Mixer, Site

_BIAS = ("attention_bias", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAttention:
    """Pangu's: only keys are normalised, and every head has keys (and may have values) of its own for the sinks."""

    def shape(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        heads = config.required("num_attention_heads", maximum=MAX_HEADS)
        kv_heads = config.integer(KV_HEADS, heads, minimum=1, maximum=MAX_HEADS) or heads
        head_dim = config.required("qk_nope_dim") + config.required("qk_rope_dim")
        value_dim = config.required("v_channels")
        q, k, v = heads * head_dim, kv_heads * head_dim, kv_heads * value_dim
        bias = _has_qkv_bias(config)
        kv_params = (hidden_size + bias) * (k + v)
        params = (hidden_size + bias) * q + kv_params + head_dim
        params += heads * value_dim * hidden_size + hidden_size * config.any_flag(_BIAS)
        sinks = config.integer("param_sink_number", 0) or 0
        params += sinks * (k + v * config.flag("param_sink_with_value"))
        return Mixer(
            kind="attention",
            params=params,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            cache_elements=k + v,
            window=site.window,
            kv_params=kv_params,
        )


def _has_qkv_bias(config: Config) -> bool:
    return config.flag("qkv_bias") if config.has("qkv_bias") else config.any_flag(_BIAS)
