"""Nemotron-H: every layer is one of a state-space mixer, attention, a feed-forward part or experts."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.disagreements import nemotron_layers
from moe_optimizer.inspection.families.common_parts import STATE_KINDS
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.layer_rules import listed, pattern
from moe_optimizer.inspection.recurrent import Mamba2

PATTERN = "hybrid_override_pattern"
TYPES = ("layers_block_type", "layer_types")
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
PER_BLOCK = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
MIXER_KINDS = {"M": "mamba", "*": "attention", "-": "none", "E": "none"}


def _words(config: Config, num_layers: int) -> tuple[str, ...]:
    """What each layer is, from the pattern string or the array of words."""
    if config.get(TYPES) is not None:
        names = {word: word for word in STATE_KINDS}
        return listed(TYPES, otherwise=pattern(PATTERN, LETTERS), names=names)(config, num_layers)
    return pattern(PATTERN, LETTERS)(config, num_layers)


def _sparse(config: Config, num_layers: int) -> tuple[bool, ...]:
    return tuple(word == "moe" for word in _words(config, num_layers))


def _has_mlp(config: Config, num_layers: int) -> tuple[bool, ...]:
    return tuple(word == "mlp" for word in _words(config, num_layers))


def _spread_blocks(config: Config) -> Config:
    """Turn a list of blocks, whose experts differ, into arrays with an entry for each layer."""
    entries = config.items("block_configs")
    if entries is None:
        return config
    blocks: list[dict[str, object]] = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise config.error(f"block_configs[{i}]", entry, "an object")
        blocks.append(entry)
    # A block that has no experts needs none of the fields; 1 is any valid number for it.
    arrays = {name: [block.get(name) or config.get(name) or 1 for block in blocks] for name in PER_BLOCK}
    if not config.has((*TYPES, PATTERN)):
        arrays[TYPES[0]] = [block.get("block_type") for block in blocks]
    return Config({**config.raw, **arrays}, where=config.where).with_defaults(config.defaults)


FAMILIES = (
    Family(
        model_types=("nemotron_h", "nemotron_h_puzzle"),
        architectures=("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
        rewrite=_spread_blocks,
        disagreement=nemotron_layers,
        kinds=listed(TYPES, otherwise=pattern(PATTERN, MIXER_KINDS), names=STATE_KINDS),
        mixers={
            "attention": Attention(head_dim=("head_dim", "attention_head_dim"), qkv_bias=False, o_bias=False),
            "mamba": Mamba2(heads=("mamba_num_heads",), head_dim=("mamba_head_dim",), bias="use_bias"),
        },
        norms=1,
        tied=False,
        dense=Dense(gated=False, bias="mlp_bias"),
        feed_forward=_has_mlp,
        experts=Experts(
            layers=_sparse,
            gated=False,
            arrays=True,
            latent=("moe_latent_size",),
            latent_bias="mlp_bias",
            shared=Shared(
                count=("n_shared_experts",),
                width=("moe_shared_expert_intermediate_size",),
                gated=False,
                bias="mlp_bias",
            ),
        ),
    ),
)
