"""Nemotron-H and Nemotron-NAS: layers that differ in what they have, as a list or a pattern in the file says."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config, lookup
from moe_optimizer.inspection.disagreements import nemotron_layers
from moe_optimizer.inspection.families.common_parts import STATE_KINDS
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.layer_rules import ExpertRule, listed, pattern
from moe_optimizer.inspection.recurrent import Mamba2
from moe_optimizer.inspection.shapes import NO_MIXER, Mixer, Site

PATTERN = "hybrid_override_pattern"
TYPES = ("layers_block_type", "layer_types")
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
PER_BLOCK = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
WORDS = listed(TYPES, otherwise=pattern(PATTERN, LETTERS), names={word: word for word in STATE_KINDS})
"""What each layer is, from the array of words or the pattern string."""
MIXER_KINDS = {letter: STATE_KINDS[word] for letter, word in LETTERS.items()}


def _layers_of(word: str) -> ExpertRule:
    return lambda config, num_layers: tuple(each == word for each in WORDS(config, num_layers))


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


def _block(config: Config, layer: int, part: str) -> Config:
    """Return one part of one layer's settings in block_configs."""
    blocks = config.items("block_configs") or []
    inner = lookup(blocks[layer], part) if layer < len(blocks) else None
    if not isinstance(inner, dict):
        raise config.error(f"block_configs[{layer}].{part}", inner, "an object")
    return Config(inner, where=f"{config.where}block_configs[{layer}].{part}.")


def searched_attention(site: Site) -> Mixer:
    """Attention whose groups differ from layer to layer, or that a layer leaves out."""
    block = _block(site.config, site.layer, "attention")
    if block.flag("no_op"):
        return NO_MIXER
    if block.flag("replace_with_linear"):
        return Mixer(kind="none", params=site.hidden_size * site.hidden_size)
    group = block.required("n_heads_in_group")
    return Attention(kv_heads=lambda _, heads: max(heads // group, 1))(site)


def _searched_widths(config: Config, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Each layer's multiple of two thirds of the hidden size, rounded up to 256."""
    hidden_size = config.required("hidden_size")
    found: list[int] = []
    for layer in range(len(widths)):
        block = _block(config, layer, "ffn")
        if block.flag("no_op"):
            found.append(0)
            continue
        own = block.integer("intermediate_size", 0) or 0
        found.append(own or 256 * -(-int(2 * block.number("ffn_mult", 0.0) * hidden_size / 3) // 256))
    return tuple(found)


def _searched_norms(site: Site) -> int:
    """A norm for each part that the layer has."""
    parts = (_block(site.config, site.layer, name) for name in ("attention", "ffn"))
    return site.hidden_size * sum(not part.flag("no_op") for part in parts)


FAMILIES = (
    Family(
        names=("nemotron_h", "nemotron_h_puzzle"),
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
        feed_forward=_layers_of("mlp"),
        experts=Experts(
            layers=_layers_of("moe"),
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
    Family(
        names=("nemotron-nas", "deci", "DeciLMForCausalLM"),
        mixers={"attention": searched_attention},
        norms=0,
        layer_extra=_searched_norms,
        dense=Dense(width=(), multiple_of_hidden=1, adjust=_searched_widths),
    ),
)
