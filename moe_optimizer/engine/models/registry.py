"""Finds the family of a model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from moe_optimizer.engine.models.decoder import CausalLM
from moe_optimizer.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = {
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
}
"""`model_type` of config.json: file of this package, class."""


def model_class(config: PreTrainedConfig) -> type[CausalLM]:
    """Return the class for a configuration.

    Raises:
        UnsupportedError: no family has its `model_type`, or a setting of it is not implemented.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"config.json: model_type: got {config.model_type!r}, expected one of {', '.join(FAMILIES)}",
            hint="docs/engine.md says how to add a family; vLLM serves more",
        )
    if getattr(config, "sliding_window", None) is not None:
        raise UnsupportedError(f"config.json: sliding_window: got {config.sliding_window}, expected none")
    if config.hidden_act != "silu":
        raise UnsupportedError(f"config.json: hidden_act: got {config.hidden_act!r}, expected 'silu'")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            "config.json: quantization_config: got a quantized checkpoint, expected plain weights",
            hint="quantization='fp8' converts the experts of a plain checkpoint while loading",
        )
    file, name = FAMILIES[config.model_type]
    return getattr(import_module(f"moe_optimizer.engine.models.{file}"), name)
