"""Turns frozen dataclasses into JSON values and back, strictly: an unknown or missing field is an error."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.plan.serve_args import ServeArguments

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return `value` as JSON values: dataclasses and mappings as objects, tuples as arrays, enums by value.

    Raises:
        TypeError: a value of a type that JSON has no form for.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, ServeArguments):
        return list(value.words)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kinds = _field_kinds(type(value))
        return {name: _encode_field(kind, getattr(value, name)) for name, kind in kinds.items()}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}: {value!r}")


def _encode_field(kind: Any, value: Any) -> Any:
    # A whole number in a float field is written as it is read back (16.0): a plan must keep its digest through a file.
    is_float = kind is float or float in typing.get_args(kind)
    return float(value) if is_float and type(value) is int else encode(value)


@cache
def _field_kinds(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def decode_text(kind: type[T], text: str, *, origin: str, schema_version: int, hint: str | None = None) -> T:
    """Build a `kind` (a dataclass with the field schema_version) from the text of a JSON file.

    Args:
        kind: the dataclass.
        text: the file's content.
        origin: how messages name the file.
        schema_version: the only one that is read.
        hint: what to do about a file of another version, or without a field.

    Raises:
        InputError: not JSON, another schema version, or see `decode`.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{origin}: got a JSON {type(data).__name__}, expected an object")
    found = data.get("schema_version")
    if found != schema_version:
        raise InputError(f"{origin}: schema_version: got {found!r:.40}, expected {schema_version}", hint=hint)
    return decode(kind, data, origin=origin, hint=hint)


def decode(kind: type[T], data: object, *, origin: str, hint: str | None = None) -> T:
    """Build a `kind` (a dataclass) from JSON values; `hint` says what to do about missing or unknown fields.

    Raises:
        InputError: a field is unknown, missing, of the wrong type or refused by its class; the message names `origin`
            and the field.
    """
    from pydantic import ValidationError

    try:
        # As text: from Python values pydantic takes no list for a tuple, and no text for an enum, when it is strict.
        return _adapter(kind).validate_json(json.dumps(data), strict=True, extra="forbid")
    except ValidationError as error:
        raise _input_error(error.errors(include_url=False), origin, hint) from None


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    # Imported here: pydantic takes longer than what is done without reading a file.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _input_error(complaints: list[ErrorDetails], origin: str, version_hint: str | None) -> InputError:
    """Return one complaint: of a union the one about the most likely member, an unknown field before missing ones."""
    unknown = "unexpected_keyword_argument"
    by_owner = Counter(each["loc"][:-1] for each in complaints)
    first = min(complaints, key=lambda each: (by_owner[each["loc"][:-1]], each["type"] != unknown))
    *owner, name = first["loc"] or ("",)
    got, hint = first["input"], None
    problem = f"got {type(got).__name__} {got!r:.80}, expected {first['msg'].removeprefix('Input should be ')}"
    refusal = first.get("ctx", {}).get("error")
    if isinstance(refusal, InputError):
        owner, problem, hint = [*owner, name], str(refusal), refusal.hint
    elif first["type"] == "missing":
        problem, hint = f"field {name!r} is missing", version_hint
    elif first["type"] == unknown:
        missing = [str(each["loc"][-1]) for each in complaints if each["type"] == "missing"]
        problem, hint = f"unknown field {name!r}", did_you_mean(str(name), missing) or version_hint
    else:
        owner = [*owner, name]
    where = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in owner if each != "[key]")
    return InputError(": ".join(filter(None, (origin, where.strip("."), problem))), hint=hint)
