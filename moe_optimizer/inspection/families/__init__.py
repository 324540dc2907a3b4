"""Finds the family of a model, the rules for its configuration, by model_type or architecture."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from moe_optimizer.inspection.families import (
    deepseek_like,
    dense,
    dense_layer_norm,
    expert_layers,
    gemma,
    generic,
    hybrid,
    inkling,
    latent,
    nemotron,
    qwen,
    sigmoid_routed,
    sparse_attention,
)
from moe_optimizer.inspection.family import Family

_TABLES = (
    dense,
    dense_layer_norm,
    gemma,
    qwen,
    expert_layers,
    sigmoid_routed,
    deepseek_like,
    latent,
    sparse_attention,
    nemotron,
    inkling,
    hybrid,
)


GENERIC = generic.FAMILY
"""Rules by field names alone, for a model that no family lists."""


def find_by_model_type(model_type: str) -> Family | None:
    """Return the family that lists a model_type."""
    return _index()[0].get(model_type)


def find_by_architecture(architectures: tuple[str, ...]) -> Family | None:
    """Return the family that lists one of the architectures; the first known one counts."""
    by_architecture = _index()[1]
    return next((by_architecture[name] for name in architectures if name in by_architecture), None)


def class_defaults(model_type: str, family: Family) -> dict[str, object]:
    """Return what the config class of a model_type assumes for fields that a file leaves out.

    The table (class_defaults.json) holds no expert counts: a file without one describes a dense model.
    """
    table = _class_defaults()
    names = (model_type, *family.model_types) if model_type in family.model_types else family.model_types
    return next((table[name] for name in names if name in table), {})


@cache
def _class_defaults() -> dict[str, dict[str, object]]:
    return json.loads(Path(__file__).with_name("class_defaults.json").read_text(encoding="utf-8"))


@cache
def _index() -> tuple[dict[str, Family], dict[str, Family]]:
    families = [family for table in _TABLES for family in table.FAMILIES]
    by_type = {model_type: family for family in families for model_type in family.model_types}
    by_architecture = {name: family for family in families for name in family.architectures}
    return by_type, by_architecture
