"""Converts a ModelSpec to the published JSON form of an inspection (docs/schemas/inspect.schema.json)."""

from __future__ import annotations

from typing import Any

from moe_optimizer.plan.json_codec import encode
from moe_optimizer.specs.model import ModelSpec


def to_inspect_json(spec: ModelSpec) -> dict[str, Any]:
    """Return a ModelSpec as the object that `inspect --json` prints: all its fields, and num_moe_layers."""
    fields = encode(spec)
    return {**fields, "num_moe_layers": spec.num_moe_layers}
