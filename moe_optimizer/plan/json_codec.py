"""Turns frozen dataclasses into JSON values and back, strictly: an unknown or missing field is an error."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.plan.serve_args import ServeArguments

T = TypeVar("T")
_MOST_DIGITS = 18
"""Of a key that is a number: what 64 bits hold."""


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


def decode_text(kind: type[T], text: str, *, origin: str, schema_version: int, hint: str | None = None) -> T:
    """Build a `kind` (a dataclass with the field schema_version) from the text of a JSON file.

    Args:
        kind: the dataclass.
        text: the file's content.
        origin: how messages name the file.
        schema_version: the only one that is read.
        hint: what to do about a file of another version.

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
    return decode(kind, data, origin=origin)


def decode(kind: type[T], data: object, *, origin: str) -> T:
    """Build a `kind` (a dataclass) from JSON values.

    Raises:
        InputError: a field is unknown, missing, of the wrong type or refused by its class; the message names `origin`
            and the field.
    """
    try:
        return cast(T, _decode(kind, data, ""))
    except InputError as error:
        raise error.named_by(origin) from None


def _decode(kind: Any, data: Any, where: str) -> Any:
    if kind is Any or data is kind is None:
        return data
    if kind is ServeArguments:
        return _decode_arguments(data, where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast(type, kind), data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _decode_enum(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        (member,) = [argument for argument in arguments if argument is not type(None)]
        return _decode(member, data, where)
    if origin is typing.Literal:
        if data not in arguments:
            raise _error(where, f"got {data!r}, expected one of {', '.join(map(repr, arguments))}")
        return data
    if origin is tuple:
        return _decode_tuple(arguments, data, where)
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(data, dict), data, "an object", where)
        return {
            _decode_key(arguments[0], key, where): _decode(arguments[1], item, _below(where, key))
            for key, item in data.items()
        }
    return _decode_scalar(kind, data, where)


def _decode_dataclass(kind: type, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), data, "an object", where)
    kinds = _field_kinds(kind)
    for name in data:
        if name not in kinds:
            expected = ", ".join(kinds)
            raise _error(where, f"unknown field {name!r}, expected one of {expected}", did_you_mean(name, kinds))
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in data:
            raise _error(where, f"field {field.name!r} is missing")
    with _refusals_named(where):
        # A field's type may depend on another field.
        kinds = kinds | kind.json_kinds(data) if hasattr(kind, "json_kinds") else kinds
    values = {name: _decode(kinds[name], item, _below(where, name)) for name, item in data.items()}
    with _refusals_named(where):
        return kind(**values)


@cache
def _field_kinds(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decode_enum(kind: type[Enum], data: Any, where: str) -> Enum:
    try:
        return kind(data)
    except ValueError:
        expected = ", ".join(repr(member.value) for member in kind)
        raise _error(where, f"got {data!r}, expected one of {expected}") from None


def _decode_key(kind: Any, key: str, where: str) -> Any:
    if kind is not int:
        return key
    if not key.isdecimal() or len(key) > _MOST_DIGITS:
        raise _error(where, f"got key {key!r:.40}, expected a whole number")
    return int(key)


def _decode_arguments(data: Any, where: str) -> ServeArguments:
    words = _decode(tuple[str, ...], data, where)
    with _refusals_named(where):
        return ServeArguments(*words)


def _decode_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(data, list), data, "an array", where)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        if arguments[0] in (int, str) and all(type(item) is arguments[0] for item in data):
            return tuple(data)  # the counts of all experts: a hundred thousand numbers
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    _expect(len(data) == len(arguments), data, f"an array of {len(arguments)}", where)
    return tuple(
        _decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(arguments, data, strict=True))
    )


def _decode_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    _expect(isinstance(data, kind) and (kind is bool or not isinstance(data, bool)), data, f"a {kind.__name__}", where)
    return data


def _expect(condition: bool, data: Any, expected: str, where: str) -> None:
    if not condition:
        raise _error(where, f"got {type(data).__name__} {data!r:.80}, expected {expected}")


@contextlib.contextmanager
def _refusals_named(where: str) -> Iterator[None]:
    """Have what a class refuses in the block say where it stands."""
    try:
        yield
    except InputError as error:
        raise _error(where, str(error), error.hint) from None


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _error(where: str, problem: str, hint: str | None = None) -> InputError:
    return InputError(f"{where}: {problem}" if where else problem, hint=hint)
