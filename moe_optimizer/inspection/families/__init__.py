"""Finds the family of a model, the rules for its configuration, by model_type or architecture."""

from __future__ import annotations

import json
import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path

from moe_optimizer.inspection.families import generic
from moe_optimizer.inspection.family import Family

GENERIC = generic.FAMILY
"""Rules by field names alone, for a model that no family lists."""
_CAUSAL = "ForCausalLM"


def find_family(*names: str) -> Family | None:
    """Return the family of one of these architectures and model_types; the first known one counts.

    An architecture that is a model_type in camel case ("Qwen3MoeForCausalLM") is of the family that lists the latter.
    """
    families = _index()
    return next((families[key] for name in names for key in (name, _folded(name)) if key in families), None)


def _folded(architecture: str) -> str:
    stem = architecture.removesuffix(_CAUSAL)
    return stem.lower().replace("_", "") + _CAUSAL if stem != architecture else architecture


def class_defaults(model_type: str, family: Family) -> dict[str, object]:
    """Return what the config class of a model_type assumes for fields that a file leaves out.

    The table (class_defaults.json) holds no expert counts: a file without one describes a dense model.
    """
    table = _class_defaults()
    names = (model_type, *family.names) if model_type in family.names else family.names
    return next((table[name] for name in names if name in table), {})


@cache
def _class_defaults() -> dict[str, dict[str, object]]:
    return json.loads(Path(__file__).with_name("class_defaults.json").read_text(encoding="utf-8"))


def all_families() -> list[Family]:
    """Return the families of every module of this package."""
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return [family for module in modules for family in getattr(module, "FAMILIES", ())]


@cache
def _index() -> dict[str, Family]:
    named = {name: family for family in all_families() for name in family.names}
    return {name.lower().replace("_", "") + _CAUSAL: family for name, family in named.items()} | named
