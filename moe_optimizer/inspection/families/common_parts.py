"""Parts and field names that families of several files share."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.feed_forward import Dense
from moe_optimizer.inspection.layer_rules import LAYER_TYPE_KINDS, words

PER_TOKEN = ("num_experts_per_tok",)
MOE_WIDTH = ("moe_intermediate_size",)
NO_BIAS = Attention(qkv_bias=False, o_bias=False)
HEAD_NORMED = Attention(qkv_bias=False, o_bias=False, qk_norm="head")
PLAIN_MLP = Dense(bias=False)
SPARSE_WORDS = ("mlp_layer_types", words("mlp_layer_types", "sparse"))
"""For `first_given`: the layers that a list calls sparse have experts."""
STATE_KINDS = {**LAYER_TYPE_KINDS, "linear_attention": "mamba"}
"""Mixers by the words of a list of layers, in families whose linear attention is a Mamba."""


def hyper_head(config: Config, hidden_size: int) -> int:
    """Return the parameters that join the residual streams after the last layer."""
    streams = config.required("hc_mult")
    return streams * streams * hidden_size + streams + 1
