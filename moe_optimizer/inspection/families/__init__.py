"""The families of models: a table of rules, looked up by a configuration's model_type or architecture."""

from __future__ import annotations

from functools import cache

from moe_optimizer.inspection.families import deepseek_like, llama_like
from moe_optimizer.inspection.family import Family

_TABLES = (llama_like, deepseek_like)


def find_family(model_type: str, architectures: tuple[str, ...]) -> Family | None:
    """Return the family of a model_type, else of the first known architecture, else None."""
    by_type, by_architecture = _index()
    if model_type in by_type:
        return by_type[model_type]
    return next((by_architecture[name] for name in architectures if name in by_architecture), None)


@cache
def _index() -> tuple[dict[str, Family], dict[str, Family]]:
    families = [family for table in _TABLES for family in table.FAMILIES]
    by_type = {model_type: family for family in families for model_type in family.model_types}
    by_architecture = {name: family for family in families for name in family.architectures}
    return by_type, by_architecture
