"""Finds the language model inside a configuration that may hold several models."""

from __future__ import annotations

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.config import Config

NESTS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model_config",
    "language_model",
    "llm",
    "text_model_config",
)
"""Fields that hold a language model's own configuration, in order of preference. Two levels occur (an omni
model's thinker holds a text_config)."""
MAX_NESTS = 3
INHERITED = ("tie_word_embeddings", "torch_dtype", "dtype", "max_position_embeddings")
"""Fields that stand beside the nested object and hold for it too."""


def find_language_config(root: Config) -> Config:
    """Return the part of config.json that describes the language model: itself, or a nested object.

    Raises:
        InputError: nested deeper than any real configuration, or a nest is not an object.
    """
    config = root
    for _ in range(MAX_NESTS):
        inner = _inner(config)
        if inner is None:
            return config
        config = inner
    if _inner(config) is not None:
        raise InputError(f"{config.where[:-1]}: nested again, expected a language model within {MAX_NESTS} levels")
    return config


def _inner(config: Config) -> Config | None:
    for name in NESTS:
        value = config.raw.get(name)
        if name == "text_config" and value is not None and not isinstance(value, dict):
            # Passing over it would describe another model than transformers builds; the other names also occur
            # as plain text (the id of the language model).
            raise config.error(name, value, "an object")
        if isinstance(value, dict) and value:
            inner = config.sub(name)
            assert inner is not None, name
            inherited = {field: config.raw[field] for field in INHERITED if field in config.raw}
            return Config({**inherited, **inner.raw}, where=inner.where)
    return None
