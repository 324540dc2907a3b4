"""Tells where vLLM and transformers build different models from one configuration; vLLM's rule is the one counted."""

from __future__ import annotations

from collections.abc import Callable

from moe_optimizer.inspection.config import Config

Note = str | None


def all_of(*rules: Callable[[Config], Note]) -> Callable[[Config], Note]:
    """Return the rule that tells what each of `rules` tells."""

    def joined(config: Config) -> Note:
        return "; ".join(note for rule in rules if (note := rule(config)) is not None) or None

    return joined


def bias_ignored(name: str) -> Callable[[Config], Note]:
    """Return the rule for a switch that gives transformers' class biases, and vLLM's none."""

    def rule(config: Config) -> Note:
        return f"{name} true: vLLM's class has no such biases, transformers' has" if config.flag(name) else None

    return rule


def shared_all_the_same(name: str) -> Callable[[Config], Note]:
    """Return the rule for transformers' classes that build a shared expert where `name` says that there is none."""

    def rule(config: Config) -> Note:
        if config.integer(name) == 0:
            return f"{name} 0: vLLM builds no shared expert, transformers one"
        return None

    return rule


def frequency_ignored(config: Config) -> Note:
    """DeepSeek's classes in transformers have experts in every layer after the first dense ones."""
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, int) and frequency > 1:
        return f"moe_layer_freq {frequency}: vLLM skips layers by it, transformers ignores it"
    return None


def interleaving_listed(config: Config) -> Note:
    """Llama 4 in transformers follows a list of expert layers; vLLM only the step."""
    listed, step = config.integers("moe_layers"), config.integer("interleave_moe_layer_step", 1)
    layers = config.integer("num_hidden_layers", 0) or 0
    if listed is None or not step or set(listed) == set(range(step - 1, layers, step)):
        return None
    return f"moe_layers differs from every {step}. layer: vLLM follows interleave_moe_layer_step, transformers the list"


def zero_experts(config: Config) -> Note:
    """LongCat's class in transformers allocates projections for experts that have none."""
    count = config.integer("zero_expert_num", 0)
    if not count:
        return None
    return f"{count} zero experts have no weights in vLLM; transformers allocates some, top_k counts both kinds"


def windowed_heads(config: Config) -> Note:
    """MiMo-V2 in transformers doubles the key/value heads in windowed layers."""
    own, full = config.integer("swa_num_key_value_heads"), config.integer("num_key_value_heads")
    if own is None or full is None or own == 2 * full:
        return None
    return f"swa_num_key_value_heads {own}: vLLM uses it, transformers takes twice num_key_value_heads"


def nemotron_layers(config: Config) -> Note:
    """Nemotron-H in transformers has as many layers as the pattern has letters, and one shared expert."""
    pattern, layers = config.get("hybrid_override_pattern"), config.integer("num_hidden_layers")
    if isinstance(pattern, str) and layers is not None and len(pattern) != layers:
        return (
            f"hybrid_override_pattern has {len(pattern)} letters: vLLM builds num_hidden_layers {layers}, "
            "transformers all"
        )
    shared = config.integer("n_shared_experts", 0) or 0
    if shared > 1 and config.get("moe_shared_expert_intermediate_size") is not None:
        return f"n_shared_experts {shared}: vLLM multiplies the shared width by it, transformers does not"
    # An array has an entry for each block: such a model has experts.
    return shared_all_the_same("n_shared_experts")(config) if config.get("n_routed_experts") else None
