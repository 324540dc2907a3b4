"""Hybrids: attention in some layers, a state or a convolution in the others (or beside it)."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.families.common_parts import NO_BIAS, STATE_KINDS
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.layer_rules import by_fields, every, indexed, last_of, listed, periodic
from moe_optimizer.inspection.recurrent import GatedDeltaNet, Mamba1, Mamba2, Parallel, ShortConv

LFM2_MIXERS = {"attention": Attention(qkv_bias=False, o_bias=False, qk_norm="head"), "conv": ShortConv()}


def _lfm2_widths(config: Config, widths: tuple[int, ...]) -> tuple[int, ...]:
    """The width that the file's means: two thirds of it, scaled and rounded up, unless adjusting is off."""
    if not config.flag("block_auto_adjust_ff_dim", True):
        return widths
    multiple = config.integer("block_multiple_of", 256, minimum=1) or 256
    scale = config.number("block_ffn_dim_multiplier", 1.0)
    return tuple(multiple * -(-int(scale * int(2 * width / 3)) // multiple) for width in widths)


FAMILIES = (
    Family(
        model_types=("jamba",),
        architectures=("JambaForCausalLM",),
        kinds=periodic("attn_layer_period", "attn_layer_offset", "attention", otherwise="mamba"),
        mixers={"attention": NO_BIAS, "mamba": Mamba1(inner_norms=True)},
        experts=Experts(
            width=("intermediate_size",),
            layers=by_fields(),
        ),
    ),
    Family(
        model_types=("mamba", "falcon_mamba"),
        architectures=("MambaForCausalLM", "FalconMambaForCausalLM"),
        kinds=every("mamba"),
        mixers={"mamba": Mamba1(inner=("intermediate_size",))},
        dense=None,
        norms=1,
    ),
    Family(
        model_types=("mamba2",),
        architectures=("Mamba2ForCausalLM",),
        kinds=every("mamba"),
        mixers={"mamba": Mamba2()},
        dense=None,
        norms=1,
    ),
    Family(
        model_types=("bamba",),
        architectures=("BambaForCausalLM",),
        kinds=indexed("attn_layer_indices", "attention", otherwise="mamba"),
        mixers={"attention": Attention(), "mamba": Mamba2()},
        dense=Dense(bias="mlp_bias"),
    ),
    Family(
        model_types=("granitemoehybrid",),
        architectures=("GraniteMoeHybridForCausalLM",),
        kinds=listed(("layers_block_type", "layer_types"), otherwise=every("mamba"), names=STATE_KINDS),
        mixers={"attention": Attention(), "mamba": Mamba2()},
        dense=Dense(width=("shared_intermediate_size",), bias=False),
        experts=Experts(
            width=("intermediate_size",),
            shared=Shared(count=1, width=("shared_intermediate_size",), width_is_total=True),
            one_is_dense=False,
        ),
    ),
    Family(
        model_types=("falcon_h1",),
        architectures=("FalconH1ForCausalLM",),
        mixers={
            "attention": Parallel(
                attention=Attention(),
                state=Mamba2(inner=("mamba_d_ssm",), norm="mamba_rms_norm", out_bias="projectors_bias"),
            )
        },
        dense=Dense(bias="mlp_bias"),
    ),
    Family(
        model_types=("lfm2",),
        architectures=("Lfm2ForCausalLM",),
        kinds=listed(otherwise=indexed("full_attn_idxs", "attention", otherwise="conv")),
        mixers=LFM2_MIXERS,
        dense=Dense(width=("block_ff_dim", "intermediate_size"), bias=False, adjust=_lfm2_widths),
    ),
    Family(
        model_types=("lfm2_moe",),
        architectures=("Lfm2MoeForCausalLM",),
        kinds=listed(otherwise=indexed("full_attn_idxs", "attention", otherwise="conv")),
        mixers=LFM2_MIXERS,
        experts=Experts(layers=by_fields()),
    ),
    Family(
        model_types=("olmo_hybrid",),
        architectures=("OlmoHybridForCausalLM",),
        kinds=listed(otherwise=last_of((), "attention", otherwise="linear", default=4)),
        mixers={"attention": Attention(qk_norm="width"), "linear": GatedDeltaNet()},
    ),
)
