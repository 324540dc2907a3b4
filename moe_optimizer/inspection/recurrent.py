"""Counts token mixers with a state of fixed size: state space, linear attention and short convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moe_optimizer.inspection.config import Config, Names
from moe_optimizer.inspection.shapes import Mixer, MixerRule, Site

EXPAND: Names = ("mamba_expand", "expand")
KERNEL: Names = ("mamba_d_conv", "conv_kernel")
DT_RANK: Names = ("mamba_dt_rank", "time_step_rank")
CONV_BIAS: Names = ("mamba_conv_bias", "use_conv_bias")
BIAS: Names = ("mamba_proj_bias", "use_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1:
    """Selective state space (Mamba)."""

    inner: Names = ("mamba_d_inner",)
    inner_norms: bool = False
    """Norms over the step, input and output projections (one weight for each of their channels)."""

    def __call__(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        inner = config.integer(self.inner, minimum=1) or config.required(EXPAND) * hidden_size
        state, kernel = config.required(("mamba_d_state", "state_size")), config.required(KERNEL)
        automatic = config.get(DT_RANK, "auto") == "auto"
        rank = math.ceil(hidden_size / 16) if automatic else config.required(DT_RANK)
        bias = config.flag(BIAS)
        params = hidden_size * 2 * inner + 2 * inner * bias
        params += inner * kernel + inner * config.flag(CONV_BIAS)
        params += inner * (rank + 2 * state) + rank * inner + inner
        params += inner * state + inner
        params += inner * hidden_size + hidden_size * bias
        params += (rank + 2 * state) * self.inner_norms
        return Mixer(kind="state", params=params, state_elements=inner * (state + kernel - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """State space with scalar decay for each head (Mamba 2)."""

    heads: Names = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    head_dim: Names = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    conv_bias: Names | bool = CONV_BIAS
    bias: Names | bool = BIAS
    out_bias: Names | bool | None = None
    """Bias of the output projection; None: as `bias`."""
    norm: Names | bool = True
    inner: Names = ()
    """Field with the inner width where it is not heads times head_dim."""

    def __call__(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        heads = config.required(self.heads)
        inner = config.integer(self.inner) or heads * self._head_dim(config, hidden_size, heads)
        groups = config.integer(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1, minimum=1) or 1
        state = config.required(("mamba_d_state", "ssm_state_size", "state_size"))
        kernel, bias = config.required(KERNEL), config.flag(self.bias)
        conv = inner + 2 * groups * state
        wide = inner + conv + heads
        params = hidden_size * wide + wide * bias + conv * kernel + conv * config.flag(self.conv_bias) + 3 * heads
        out_bias = bias if self.out_bias is None else config.flag(self.out_bias)
        params += inner * config.flag(self.norm) + inner * hidden_size + hidden_size * out_bias
        return Mixer(kind="state", params=params, state_elements=inner * state + conv * (kernel - 1))

    def _head_dim(self, config: Config, hidden_size: int, heads: int) -> int:
        if config.get(self.head_dim, "auto") == "auto":
            return config.required(EXPAND) * hidden_size // heads
        return config.required(self.head_dim)


def gated_delta_net(site: Site) -> Mixer:
    """Linear attention with the gated delta rule.

    It has query, key, value and gate projections, two gates a head, and a convolution.
    """
    config, hidden_size = site.config, site.hidden_size
    heads = config.integer("num_attention_heads")
    k_heads = config.integer("linear_num_key_heads", heads) or config.required("linear_num_key_heads")
    v_heads = config.integer("linear_num_value_heads", heads) or config.required("linear_num_value_heads")
    k_dim = config.integer("linear_key_head_dim", 3 * hidden_size // (4 * k_heads)) or 0
    v_dim = config.integer("linear_value_head_dim", 2 * k_dim) or 0
    kernel = config.required("linear_conv_kernel_dim")
    key, value = k_heads * k_dim, v_heads * v_dim
    conv = 2 * key + value
    params = hidden_size * (2 * key + 2 * value) + hidden_size * 2 * v_heads + conv * kernel
    params += 2 * v_heads + v_dim + value * hidden_size
    return Mixer(kind="state", params=params, state_elements=v_heads * k_dim * v_dim + conv * (kernel - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaAttention:
    """Linear attention with the delta rule and a decay for each channel, computed through a low rank."""

    heads: Names = ("linear_num_heads", "linear_attn_config.num_heads")
    head_dim: Names = ("linear_head_dim", "linear_attn_config.head_dim")
    kernel: Names = ("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size")

    def __call__(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        heads, head_dim = config.required(self.heads), config.required(self.head_dim)
        kernel, width = config.required(self.kernel), heads * head_dim
        low_rank = hidden_size * head_dim + head_dim * width
        # The output gate is one projection instead of two of low rank.
        full_rank = config.flag("linear_attn_config.use_full_rank_gate")
        gate = hidden_size * width if full_rank else low_rank
        params = 3 * hidden_size * width + 3 * width * kernel + low_rank + gate + width + heads + hidden_size * heads
        params += head_dim + width * hidden_size
        return Mixer(kind="state", params=params, state_elements=width * head_dim + 3 * width * (kernel - 1))


def short_conv(site: Site) -> Mixer:
    """A gated depthwise convolution over a few tokens."""
    config, hidden_size = site.config, site.hidden_size
    kernel, bias = config.required("conv_L_cache"), config.flag("conv_bias")
    params = hidden_size * 3 * hidden_size + hidden_size * kernel + hidden_size * hidden_size
    params += (3 + 1 + 1) * hidden_size * bias
    return Mixer(kind="state", params=params, state_elements=hidden_size * (kernel - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningAttention:
    """Linear attention with a fixed decay for each head, an output gate and a norm over all heads."""

    qk_norm: Names | bool = False
    """One weight vector of head_dim for all query heads and one for all key heads."""
    qkv_bias: Names | bool = False
    o_bias: Names | bool = False

    def __call__(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        heads = config.required("num_attention_heads")
        head_dim = config.integer("head_dim") or hidden_size // heads
        width = heads * head_dim
        params = hidden_size * 3 * width + hidden_size * width + width * hidden_size + width
        params += 2 * head_dim * config.flag(self.qk_norm)
        params += 3 * width * config.any_flag(self.qkv_bias) + hidden_size * config.any_flag(self.o_bias)
        return Mixer(kind="state", params=params, state_elements=heads * head_dim * head_dim)


def parallel(attention: MixerRule, state: MixerRule) -> MixerRule:
    """Return the rule for two mixers side by side in one layer; it caches what the attention caches."""

    def both(site: Site) -> Mixer:
        one, two = attention(site), state(site)
        return replace(one, params=one.params + two.params, state_elements=two.state_elements)

    return both
