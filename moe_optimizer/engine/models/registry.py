"""Finds the family of a model: the class in the file of this folder that is named as its `model_type`."""

from importlib import import_module
from pathlib import Path
from typing import Any

from moe_optimizer.engine.models.decoder import CausalLM
from moe_optimizer.errors import UnsupportedError

_FAMILIES = sorted({path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - {"decoder", "registry"})
_SETTINGS = {"sliding_window": None, "hidden_act": "silu", "quantization_config": None}
"""What every family computes; with another value its outputs would be wrong."""


def model_class(config: Any) -> type[CausalLM]:
    """Return the class for a configuration."""
    if config.model_type not in _FAMILIES:
        raise UnsupportedError(
            f"config.json: model_type: got {config.model_type!r}, expected one of {', '.join(_FAMILIES)}",
            hint="docs/engine.md says how to add a family; vLLM serves more",
        )
    for name, expected in _SETTINGS.items():
        if (got := getattr(config, name, None)) != expected:
            raise UnsupportedError(f"config.json: {name}: got {got!r}, expected {expected!r}", hint="vLLM serves more")
    module = import_module(f"{__package__}.{config.model_type}")
    return next(each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__)
