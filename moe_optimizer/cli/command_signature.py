"""Turns the options that a command declares as a dataclass into the signature that its parser is made from."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from moe_optimizer.cli.options import SWITCHES, CommonOptions

Options = TypeVar("Options", bound=CommonOptions)

Command = Callable[[], int]
"""A command with its options filled in, ready to run."""


def takes(kind: type[Options]) -> Callable[[Callable[[Options], int]], Callable[..., Command]]:
    """Give a command function the signature that `kind` declares; the parser's call returns it ready to run.

    It is not run inside the parser, which would answer an interrupt or a closed pipe in its own way.

    A field without a typer annotation is not an option of its own: `switches` becomes a pair --enable-X/--disable-X
    for each of SWITCHES, `vllm_args` receives what followed `--`.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    parameters = {f.name: (hints[f.name], _default(f)) for f in fields if hasattr(hints[f.name], "__metadata__")}
    # What every command takes comes last in its help.
    common = {f.name: parameters.pop(f.name) for f in dataclasses.fields(CommonOptions)}
    has_switches = any(f.name == "switches" for f in fields)
    if has_switches:
        parameters |= {_switch_field(flag): (_switch_type(flag), None) for flag in SWITCHES}
    parameters |= common

    def decorate(function: Callable[[Options], int]) -> Callable[..., Command]:
        def command(context: typer.Context, **values: Any) -> Command:
            if has_switches:
                given = {flag: values.pop(_switch_field(flag)) for flag in SWITCHES}
                values["switches"] = {flag: value for flag, value in given.items() if value is not None}
                values["vllm_args"] = tuple(context.obj or ())
            return functools.partial(function, kind(**values))

        annotations = {"context": typer.Context} | {name: hint for name, (hint, _) in parameters.items()}
        command.__annotations__ = annotations
        command.__doc__, command.__name__ = function.__doc__, function.__name__
        keyword = inspect.Parameter.KEYWORD_ONLY
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
            + [
                inspect.Parameter(name, keyword, default=default, annotation=hint)
                for name, (hint, default) in parameters.items()
            ]
        )
        return command

    return decorate


def _default(declared: dataclasses.Field[Any]) -> Any:
    factory = declared.default_factory
    return declared.default if factory is dataclasses.MISSING else factory()


def _switch_field(flag: str) -> str:
    return "switch_" + flag.replace("-", "_")


def _switch_type(flag: str) -> Any:
    declaration = f"--enable-{flag}/--disable-{flag}"
    return Annotated[bool | None, typer.Option(declaration, help=SWITCHES[flag])]
