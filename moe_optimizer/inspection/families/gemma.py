"""Gemma: four norms a layer from the second generation on, windowed and full layers in a pattern."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.layer_rules import last_of, listed

FAMILIES = (
    Family(
        model_types=("gemma",),
        architectures=("GemmaForCausalLM",),
        defaults={"tie_word_embeddings": True},
    ),
    Family(
        model_types=("gemma2",),
        architectures=("Gemma2ForCausalLM",),
        kinds=listed(otherwise=last_of((), "attention", otherwise="sliding", default=2)),
        norms=4,
        defaults={"tie_word_embeddings": True},
    ),
    Family(
        model_types=("vaultgemma",),
        architectures=("VaultGemmaForCausalLM",),
        kinds=listed(otherwise=last_of((), "attention", otherwise="sliding", default=2)),
        defaults={"tie_word_embeddings": True},
    ),
    Family(
        model_types=("gemma3_text", "gemma3"),
        architectures=("Gemma3ForCausalLM", "Rnj1ForCausalLM"),
        kinds=listed(
            otherwise=last_of(
                ("sliding_window_pattern", "_sliding_window_pattern"), "attention", otherwise="sliding", default=6
            )
        ),
        mixers={"attention": Attention(qk_norm="head")},
        norms=4,
        defaults={"tie_word_embeddings": True},
    ),
)
