"""Declares options and arguments as fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

import typer

from moe_optimizer.cli.option_values import completes, one_of

DECLARATION = "declaration"
"""Key of a field's metadata: the typer option or argument that fills the field."""


def flag(name: str, text: str) -> Any:
    """Declare an option without a value."""
    return field(default=False, metadata={DECLARATION: typer.Option(name, help=text)})


def argument(metavar: str, text: str) -> Any:
    """Declare an argument that may be left out."""
    return field(default=None, metadata={DECLARATION: typer.Argument(metavar=metavar, help=text, show_default=False)})


def option(
    name: str,
    metavar: str,
    text: str,
    parser: Callable[[str], Any] | None = None,
    *,
    values: Iterable[str] | Callable[[], Iterable[str]] = (),
    default: Any = None,
) -> Any:
    """Declare an option with a value; the shell completes it from `values`."""
    declared = typer.Option(
        name, metavar=metavar, help=text, parser=parser, autocompletion=completes(values), show_default=False
    )
    return field(default=default, metadata={DECLARATION: declared})


def choice(name: str, metavar: str, text: str, choices: tuple[str, ...], *, default: str | None = None) -> Any:
    """Declare an option whose value is one of `choices`."""
    return option(name, metavar, text, one_of(choices), values=choices, default=default)
