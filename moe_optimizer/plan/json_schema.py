"""The JSON Schema of a published plan, derived from the types themselves."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from moe_optimizer.plan.plan import SCHEMA_VERSION, Plan

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of what `plan --json` prints."""
    definitions: dict[str, Any] = {}
    root = _definition(Plan, definitions)
    root["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    root["properties"]["digest"] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
    root["required"] = sorted([*root["required"], "digest"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "moe-optimizer plan",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _definition(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    return {
        "type": "object",
        "properties": {field.name: _schema(hints[field.name], definitions) for field in fields},
        "required": sorted(field.name for field in fields),
        "additionalProperties": False,
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind is Any:
        return {}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}
            definitions[kind.__name__] = _definition(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is tuple:
        items = [_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    assert origin is not None, f"no JSON schema for {kind}"
    assert issubclass(origin, Mapping), f"no JSON schema for {kind}"
    return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
