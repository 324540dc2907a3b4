"""Gives typed, checked access to the raw fields of a model configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.json_file import shown

MAX_COUNT = 1 << 32
"""Largest accepted value of any size field; beyond it the arithmetic means nothing."""

_MOST_NAMED = 5
"""Fields that a message names of those that were looked for."""

Names = str | Sequence[str]
"""One field name, or several in order of preference; "a.b" looks into a nested object."""


class Config:
    """One (sub)object of config.json with the defaults of its family.

    A field is looked up in the file first, then in `defaults`; null counts as absent. Nothing else is invented.

    Args:
        raw: the object as parsed.
        where: how messages name it, for example "config.json: text_config."; ends with a separator.
        defaults: what the family's config class assumes for fields that a file leaves out.
    """

    def __init__(self, raw: Mapping[str, object], *, where: str, defaults: Mapping[str, object] | None = None) -> None:
        self.raw = raw
        self.where = where
        self.defaults = defaults or {}

    def with_defaults(self, defaults: Mapping[str, object]) -> Config:
        """Return the same object; `defaults` fill in after the ones it already has."""
        return Config(self.raw, where=self.where, defaults={**defaults, **self.defaults})

    def get(self, names: Names, default: object = None) -> object:
        """Return the first field that is present and not null."""
        found = self._find(names)
        return default if found is None else found[1]

    def has(self, names: Names) -> bool:
        """Whether the file itself (not the defaults) has one of the fields, not null."""
        return any(lookup(self.raw, name) is not None for name in _each(names))

    def integer(
        self, names: Names, default: int | None = None, *, minimum: int = 0, maximum: int = MAX_COUNT
    ) -> int | None:
        """Return an integer field, or `default` where it is absent.

        Raises:
            InputError: not an integer, or out of range.
        """
        found = self._find(names)
        if found is None:
            return default
        return self._checked(found[0], found[1], minimum, maximum)

    def required(self, names: Names, *, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
        """Return an integer field that must be there.

        Raises:
            InputError: absent, not an integer, or out of range.
        """
        value = self.integer(names, minimum=minimum, maximum=maximum)
        if value is None:
            others = list(_each(names))[1:_MOST_NAMED]
            raise InputError(
                f"{self.where}{next(_each(names))}: is missing, expected an integer of at least {minimum}",
                hint=f"also looked for {', '.join(others)}" if others else None,
            )
        return value

    def number(self, names: Names, default: float) -> float:
        """Return a finite number, or `default` where it is absent.

        Raises:
            InputError: not a finite number.
        """
        value = self._typed(names, (int, float), "a finite number")
        if value is not None and not math.isfinite(value):
            raise self.error(self.name_of(names), value, "a finite number")
        return default if value is None else float(value)

    def flag(self, names: Names | bool, default: bool = False) -> bool:
        """Return a boolean field; a bool instead of a name is returned as it is, 0 and 1 count as booleans.

        Raises:
            InputError: not a boolean.
        """
        if isinstance(names, bool):
            return names
        found = self._find(names)
        if found is None:
            return default
        name, value = found
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise self.error(name, value, "true or false")

    def any_flag(self, names: Names | bool) -> bool:
        """Return whether one of several boolean fields is on.

        Raises:
            InputError: one is not a boolean.
        """
        if isinstance(names, bool):
            return names
        flags = [self.flag(name) for name in _each(names)]  # all are read, so that a wrong type is found
        return any(flags)

    def text(self, names: Names, default: str = "") -> str:
        """Return a string field.

        Raises:
            InputError: not a string.
        """
        value = self._typed(names, (str,), "a string")
        return default if value is None else value

    def items(self, names: Names) -> list[object] | None:
        """Return an array field, or None where it is absent.

        Raises:
            InputError: not an array.
        """
        return self._typed(names, (list,), "an array")

    def integers(self, names: Names, *, minimum: int = 0, maximum: int = MAX_COUNT) -> tuple[int, ...] | None:
        """Return an array of integers, or None where it is absent; a comma-separated string counts as one.

        Raises:
            InputError: neither, or an element is not an integer in range.
        """
        value = self._typed(names, (list, str), "an array of integers")
        if value is None:
            return None
        if isinstance(value, str):
            value = [_integer_text(part) for part in value.split(",") if part.strip()]
        name = self.name_of(names)
        return tuple(self._checked(f"{name}[{i}]", item, minimum, maximum) for i, item in enumerate(value))

    def per_layer(
        self, names: Names, num_layers: int, default: int | None = None, *, minimum: int = 0
    ) -> tuple[int, ...] | None:
        """Return one integer for each layer from a field that holds one for all, alone or in an array, or an array.

        Raises:
            InputError: wrong type, out of range, or an array shorter than the layers.
        """
        found = self._find(names)
        if found is None:
            return None if default is None else (default,) * num_layers
        name, value = found
        if not isinstance(value, list):
            return (self._checked(name, value, minimum, MAX_COUNT),) * num_layers
        values = self.integers(name, minimum=minimum) or ()
        if len(values) == 1:
            return values * num_layers
        if len(values) < num_layers:
            raise self.too_few(name, len(values), num_layers)
        return values[:num_layers]

    def sub(self, name: str) -> Config | None:
        """Return a nested object, or None where it is absent.

        Raises:
            InputError: not an object.
        """
        value = lookup(self.raw, name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Config(value, where=f"{self.where}{name}.")

    def entries(self, names: Names) -> Mapping[str, object]:
        """Return what a nested object holds; nothing where there is none, or where it is something else."""
        value = self.get(names)
        return value if isinstance(value, dict) else {}

    def name_of(self, names: Names) -> str:
        """Return which of the fields is the one that is used, for error messages."""
        found = self._find(names)
        return found[0] if found is not None else next(_each(names))

    def error(self, name: str, got: object, expected: str) -> InputError:
        """Return (not raise) the error for a field whose value makes no sense."""
        return InputError(f"{self.where}{name}: got {shown(got)}, expected {expected}")

    def too_few(self, names: Names, count: int, num_layers: int) -> InputError:
        """Return (not raise) the error for an array that is shorter than the layers."""
        return InputError(
            f"{self.where}{self.name_of(names)}: got {count} entries, expected one for each of {num_layers} layers"
        )

    def _find(self, names: Names) -> tuple[str, object] | None:
        for name in _each(names):
            value = lookup(self.raw, name)
            if value is not None:
                return name, value
        if any(name in self.raw for name in _each(names)):
            return None  # null in the file: the config class would keep it, not fall back to its default
        for name in _each(names):
            value = lookup(self.defaults, name)
            if value is not None:
                return name, value
        return None

    def _typed(self, names: Names, types: tuple[type, ...], expected: str) -> Any:
        """Return a field of one of these types, or None where it is absent; a boolean is no number."""
        found = self._find(names)
        if found is not None and (isinstance(found[1], bool) or not isinstance(found[1], types)):
            raise self.error(found[0], found[1], expected)
        return None if found is None else found[1]

    def _checked(self, name: str, value: object, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(name, value, f"an integer from {minimum} to {maximum}")
        return value


def _each(names: Names) -> Iterator[str]:
    return iter((names,) if isinstance(names, str) else names)


def lookup(entry: object, name: str) -> object:
    """Return what an object has under a name, "a.b" in a nested object; None where it has nothing, or is none."""
    if not isinstance(entry, Mapping):
        return None
    if name in entry or "." not in name:
        return entry.get(name)
    head, _, tail = name.partition(".")
    return lookup(entry.get(head), tail)


def _integer_text(part: str) -> object:
    try:
        return int(part)
    except ValueError:
        return part
