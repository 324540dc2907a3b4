"""Hybrids: attention in some layers, a state, a recurrence or a convolution in the others (or beside it)."""

from __future__ import annotations

from dataclasses import replace

from moe_optimizer.inspection.attention import MAX_HEADS, Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.families.common_parts import GRANITE_EXPERTS, HEAD_NORMED, NO_BIAS, STATE_KINDS, halves
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, mlp_params
from moe_optimizer.inspection.layer_rules import by_fields, every, every_offset, indices, last_of, listed, where
from moe_optimizer.inspection.recurrent import Mamba1, Mamba2, gated_delta_net, parallel, short_conv
from moe_optimizer.inspection.shapes import Mixer, Site

LFM2_MIXERS = {"attention": HEAD_NORMED, "conv": short_conv}


def _lfm2_widths(config: Config, widths: tuple[int, ...]) -> tuple[int, ...]:
    """The width that the file's means: two thirds of it, scaled and rounded up, unless adjusting is off."""
    if not config.flag("block_auto_adjust_ff_dim", True):
        return widths
    multiple = config.integer("block_multiple_of", 256, minimum=1) or 256
    scale = config.number("block_ffn_dim_multiplier", 1.0)
    return tuple(multiple * -(-int(scale * int(2 * width / 3)) // multiple) for width in widths)


ZAMBA_MAMBA = Mamba2(head_dim=("mamba_headdim",), bias="add_bias_linear", conv_bias=True)


def shared_block_site(site: Site) -> Mixer:
    """A state-space layer in front of which one of a few shared attention blocks runs, with adapters of its own.

    The shared blocks are counted once, outside the layers.
    """
    config, hidden_size = site.config, site.hidden_size
    state = ZAMBA_MAMBA(site)
    heads = config.required("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, minimum=1, maximum=MAX_HEADS) or heads
    rank, width = config.required("adapter_rank"), _zamba_width(config, hidden_size)
    adapters = hidden_size * rank + rank * 2 * width
    if config.flag("use_shared_attention_adapter"):
        adapters += 3 * 2 * 2 * hidden_size * rank
    head_dim = 2 * hidden_size // heads
    return Mixer(
        params=state.params + hidden_size * hidden_size + adapters,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        cache_elements=2 * kv_heads * head_dim,
        state_elements=state.state_elements,
    )


def _zamba_width(config: Config, hidden_size: int) -> int:
    return config.integer("intermediate_size", 0) or 4 * hidden_size


def _zamba_shared(config: Config, hidden_size: int) -> int:
    """The shared blocks: attention over the states and the embeddings side by side, feed-forward, two norms."""
    heads = config.required("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, minimum=1) or heads
    head_dim = 2 * hidden_size // heads
    attention = 2 * hidden_size * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden_size
    width, bias = _zamba_width(config, hidden_size), config.flag("add_bias_linear")
    block = attention + mlp_params(hidden_size, width, gated=True, bias=bias) + 3 * hidden_size
    return block * config.required("num_mem_blocks")


def gated_recurrence(site: Site) -> Mixer:
    """A linear recurrence with input and decay gates for each block of channels, behind a short convolution."""
    config, hidden_size = site.config, site.hidden_size
    heads = config.required("num_attention_heads", maximum=MAX_HEADS)
    width = config.integer("lru_width", hidden_size) or hidden_size
    block, kernel = width // heads, config.required("conv1d_width")
    params = 3 * hidden_size * width + 2 * width + hidden_size + width * kernel + width
    params += width + 2 * heads * (block * block + block)
    return Mixer(kind="state", params=params, state_elements=width * kernel)


def _griffin_kinds(config: Config, num_layers: int) -> tuple[str, ...]:
    """The listed types, repeated."""
    types = config.items("block_types") or ["recurrent", "recurrent", "attention"]
    return tuple("sliding" if types[i % len(types)] == "attention" else "recurrent" for i in range(num_layers))


FAMILIES = (
    Family(
        names=("jamba",),
        kinds=where(every_offset("attn_layer_period", "attn_layer_offset"), "attention", otherwise="mamba"),
        mixers={"attention": NO_BIAS, "mamba": Mamba1(inner_norms=True)},
        experts=Experts(
            width=("intermediate_size",),
            layers=by_fields(),
        ),
    ),
    Family(
        names=("mamba", "falcon_mamba"),
        kinds=every("mamba"),
        mixers={"mamba": Mamba1(inner=("intermediate_size",))},
        dense=None,
        norms=1,
    ),
    Family(
        names=("mamba2",),
        kinds=every("mamba"),
        mixers={"mamba": Mamba2()},
        dense=None,
        norms=1,
    ),
    Family(
        names=("bamba",),
        kinds=where(indices("attn_layer_indices"), "attention", otherwise="mamba"),
        mixers={"attention": Attention(), "mamba": Mamba2()},
        dense=Dense(bias="mlp_bias"),
    ),
    Family(
        names=("granitemoehybrid",),
        kinds=listed(("layers_block_type", "layer_types"), otherwise=every("mamba"), names=STATE_KINDS),
        mixers={"attention": Attention(), "mamba": Mamba2()},
        dense=Dense(width=("shared_intermediate_size",), bias=False),
        experts=replace(GRANITE_EXPERTS, one_is_dense=False),
    ),
    Family(
        names=("falcon_h1",),
        mixers={
            "attention": parallel(
                Attention(),
                Mamba2(inner=("mamba_d_ssm",), norm="mamba_rms_norm", out_bias="projectors_bias"),
            )
        },
        dense=Dense(bias="mlp_bias"),
    ),
    Family(
        names=("lfm2",),
        kinds=listed(otherwise=where(indices("full_attn_idxs"), "attention", otherwise="conv")),
        mixers=LFM2_MIXERS,
        dense=Dense(width=("block_ff_dim", "intermediate_size"), bias=False, adjust=_lfm2_widths),
    ),
    Family(
        names=("lfm2_moe",),
        kinds=listed(otherwise=where(indices("full_attn_idxs"), "attention", otherwise="conv")),
        mixers=LFM2_MIXERS,
        experts=Experts(layers=by_fields()),
    ),
    Family(
        names=("olmo_hybrid",),
        kinds=listed(otherwise=last_of(otherwise="linear", default=4)),
        mixers={"attention": Attention(qk_norm="width"), "linear": gated_delta_net},
    ),
    Family(
        names=("zamba2",),
        kinds=listed(
            ("layers_block_type", "layer_types"),
            otherwise=every("mamba"),
            names={"mamba": "mamba", "linear_attention": "mamba", "hybrid": "shared", "m": "mamba", "g": "shared"},
        ),
        mixers={"mamba": ZAMBA_MAMBA, "shared": shared_block_site},
        dense=None,
        norms=1,
        model_extra=_zamba_shared,
        defaults={"mamba_headdim": "auto"},
    ),
    Family(
        names=("recurrent_gemma",),
        kinds=_griffin_kinds,
        mixers={"attention": Attention(o_bias=True), "recurrent": gated_recurrence},
        window="attention_window_size",
        dense=Dense(bias=True, adjust=halves),
    ),
)
