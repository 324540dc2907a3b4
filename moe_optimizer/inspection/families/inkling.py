"""Inkling: relative-position logits, short convolutions around every part, shared experts in the router."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config, Names
from moe_optimizer.inspection.families.common_parts import HEAD_NORMED
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared
from moe_optimizer.inspection.layer_rules import SPARSE_WORDS, after_first, first_given, listed
from moe_optimizer.inspection.shapes import Mixer, Site

KERNEL: Names = ("sconv_kernel_size", "conv_kernel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeAttention:
    """Head-normed attention with learned logits for the distance and convolutions over keys and values."""

    attention: Attention
    extent: Names
    """Field with the number of distances that have a logit."""

    def __call__(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        base = self.attention(site)
        relative = config.required("d_rel")
        params = base.params + hidden_size * base.num_heads * relative + relative * config.required(self.extent)
        params += base.cache_elements * config.required(KERNEL)
        state_elements = base.cache_elements * (config.required(KERNEL) - 1)
        return replace(base, params=params, state_elements=state_elements)


def _windowed(config: Config, num_layers: int) -> tuple[str, ...]:
    """Five windowed layers and a full one, unless the windowed ones are listed."""
    local = config.integers("local_layer_ids")
    windowed = set(local) if local is not None else {i for i in range(num_layers) if (i + 1) % 6}
    return tuple("sliding" if i in windowed else "attention" for i in range(num_layers))


def _convolutions(site: Site) -> int:
    """Two convolutions, and a scale of the feed-forward part or the router and the shared experts' routing rows."""
    return 2 * site.hidden_size * site.config.required(KERNEL) + 1


FAMILIES = (
    Family(
        names=("inkling_text", "inkling_model", "InklingForCausalLM", "InklingForConditionalGeneration"),
        kinds=listed(otherwise=_windowed, names={"hybrid_sliding": "sliding", "hybrid": "attention"}),
        mixers={
            "attention": RelativeAttention(attention=HEAD_NORMED, extent="rel_extent"),
            "sliding": RelativeAttention(
                attention=replace(
                    HEAD_NORMED,
                    heads=("swa_num_attention_heads",),
                    kv_heads=("swa_num_key_value_heads",),
                    head_dim=("swa_head_dim",),
                ),
                extent="sliding_window_size",
            ),
        },
        window="sliding_window_size",
        embedding_norm=True,
        layer_extra=_convolutions,
        dense=Dense(width=("dense_intermediate_size", "intermediate_size"), bias=False),
        experts=Experts(
            layers=first_given(SPARSE_WORDS, otherwise=after_first("dense_mlp_idx")),
            routes_shared=True,
            shared=Shared(),
        ),
    ),
)
