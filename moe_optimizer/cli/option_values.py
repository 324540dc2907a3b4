"""Parses, checks and completes the values of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from moe_optimizer.env import milliseconds_in, seconds_in
from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.synonyms import SWITCHES


def whole_number(lowest: int, highest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in [lowest, highest]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not lowest <= value <= highest:
            raise typer.BadParameter(f"got {text!r}, expected a whole number from {lowest} to {highest}")
        return value

    return parse


def whole_numbers(flag: str, text: str, highest: int) -> tuple[int, ...]:
    """Parse whole numbers in [1, highest], separated by commas.

    Raises:
        InputError: names the flag.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part[:9]) <= highest for part in parts):
        raise InputError(f"{flag}: got {text!r:.80}, expected numbers from 1 to {highest}, separated by commas")
    return tuple(int(part) for part in parts)


def positive_numbers(flag: str, text: str) -> tuple[float, ...]:
    """Parse positive, finite numbers, separated by commas.

    Raises:
        InputError: names the flag.
    """
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < each < float("inf") for each in values):
        raise InputError(f"{flag}: got {text!r:.80}, expected positive numbers, separated by commas")
    return values


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds: 20 or 20s."""
    value = seconds_in(text)
    if not value:
        raise typer.BadParameter(f"got {text!r}, expected a positive number of seconds")
    return value


def milliseconds(text: str) -> float:
    """Parse a positive, finite number of milliseconds: 20 or 20ms."""
    value = milliseconds_in(text)
    if not value:
        raise typer.BadParameter(f"got {text!r}, expected a positive number of milliseconds")
    return value


def layout_name(text: str) -> str:
    """Check that a text is the name of a layout, and return it."""
    from moe_optimizer.specs.layout import parse_layout

    try:
        return parse_layout(text).name
    except InputError as error:
        raise HintedError(str(error).removeprefix("layout: "), error.hint) from None


def seconds_or_none(text: str) -> float:
    """Parse a finite number of seconds, 0 included: 20 or 20s."""
    value = seconds_in(text)
    if value is None:
        raise typer.BadParameter(f"got {text!r}, expected a number of seconds, 0 or more")
    return value


class HintedError(typer.BadParameter):
    """A value that is refused, with a hint."""

    def __init__(self, message: str, hint: str | None) -> None:
        super().__init__(message)
        self.hint = hint


class NotOneOfError(HintedError):
    """A value is not one of its choices; the nearest one is the hint."""

    def __init__(self, text: str, choices: tuple[str, ...]) -> None:
        super().__init__(f"got {text!r}, expected one of {', '.join(choices)}", did_you_mean(text, choices))


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """Return a parser that takes one of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise NotOneOfError(text, choices)
        return text

    return parse


def switch_name(text: str) -> str:
    """Return our name of the switch that a synonym means; any other text as it is."""
    return SWITCHES.get(text.strip().lower().replace("_", "-"), text)


def completes(values: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function: it offers those of `values` that begin with the typed part."""

    def complete(incomplete: str) -> list[str]:
        known = values() if callable(values) else values
        return [value for value in known if value.startswith(incomplete)]

    return complete
