"""Holds the parts that families of several files share."""

from __future__ import annotations

from dataclasses import replace

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.feed_forward import Experts, Shared
from moe_optimizer.inspection.layer_rules import LAYER_TYPE_KINDS, by_fields
from moe_optimizer.inspection.shapes import Site

BIASED = Attention(qkv_bias=True, o_bias=True)
NO_BIAS = Attention(qkv_bias=False, o_bias=False)
HEAD_NORMED = Attention(qkv_bias=False, o_bias=False, qk_norm="head")
BIASED_NORMED = replace(BIASED, qk_norm="head", qk_norm_when="qk_layernorm", qk_norm_bias=True)
EXPERTS = Experts(layers=by_fields(), shared=Shared())
GRANITE_EXPERTS = Experts(
    width=("intermediate_size",),
    shared=Shared(count=1, width=("shared_intermediate_size",), width_is_total=True),
)
STATE_KINDS = {**LAYER_TYPE_KINDS, "linear_attention": "mamba"}
"""Mixers by the words of a list of layers, in families whose linear attention is a Mamba."""


def halves(_: Config, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the widths where the file counts gate and up projection together."""
    return tuple(width // 2 for width in widths)


def hyper_head(config: Config, hidden_size: int) -> int:
    """Return the parameters that join the residual streams after the last layer."""
    streams = config.required("hc_mult")
    return streams * streams * hidden_size + streams + 1


def pair_hyper(site: Site) -> int:
    """Return the parameters that mix the residual streams in a layer: two outputs for each stream."""
    return _hyper_connections(site, outputs=2, scales=2)


def square_hyper(site: Site) -> int:
    """Return them where a matrix mixes the streams too."""
    return _hyper_connections(site, outputs=2 + site.config.required("hc_mult"), scales=3)


def _hyper_connections(site: Site, *, outputs: int, scales: int) -> int:
    """Return the parameters before attention and before the feed-forward part; `outputs` are of each stream."""
    streams = site.config.required("hc_mult")
    return 2 * (outputs * streams * streams * site.hidden_size + outputs * streams + scales)
