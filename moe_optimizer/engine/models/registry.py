"""Finds the family of a model."""

from typing import Any

from moe_optimizer.engine.models.decoder import CausalLM
from moe_optimizer.engine.models.mixtral import MixtralForCausalLM
from moe_optimizer.engine.models.olmoe import OlmoeForCausalLM
from moe_optimizer.engine.models.qwen3 import Qwen3ForCausalLM
from moe_optimizer.engine.models.qwen3_moe import Qwen3MoeForCausalLM
from moe_optimizer.errors import UnsupportedError

FAMILIES: dict[str, type[CausalLM]] = {
    "qwen3": Qwen3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "mixtral": MixtralForCausalLM,
    "olmoe": OlmoeForCausalLM,
}
"""By `model_type` of config.json."""
_SETTINGS = {"sliding_window": None, "hidden_act": "silu", "quantization_config": None}
"""What every family computes; with another value its outputs would be wrong."""


def model_class(config: Any) -> type[CausalLM]:
    """Return the class for a configuration."""
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"config.json: model_type: got {config.model_type!r}, expected one of {', '.join(FAMILIES)}",
            hint="docs/engine.md says how to add a family; vLLM serves more",
        )
    for name, expected in _SETTINGS.items():
        if (got := getattr(config, name, None)) != expected:
            raise UnsupportedError(
                f"config.json: {name}: got {got!r}, expected {expected!r}",
                hint="vLLM serves more; quantization='fp8' converts the experts of a plain checkpoint while loading",
            )
    return FAMILIES[config.model_type]
