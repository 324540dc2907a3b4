"""Gives a command function the signature from which Typer builds its parser."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from moe_optimizer.cli import messages
from moe_optimizer.cli.option_fields import DECLARATION
from moe_optimizer.cli.options import SWITCHES, CommonOptions, PlanOptions
from moe_optimizer.plan.serve_args import ServeArguments

Options = TypeVar("Options", bound=CommonOptions)

Command = Callable[[], int]
"""A command with its options filled in, ready to run."""


def takes(kind: type[Options]) -> Callable[[Callable[[Options], messages.Output | int]], Callable[..., Command]]:
    """Give a command function the signature that `kind` declares.

    The parser returns the command with its options filled in and does not run it: inside the parser, Typer would
    handle an interrupt or a closed pipe in its own way.

    Fields without a declaration: `switches` becomes a pair --enable-X/--disable-X for each of SWITCHES, `vllm_args`
    receives the arguments after `--`.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    # What every command takes comes last in its help.
    common = [fields.pop(field.name) for field in dataclasses.fields(CommonOptions)]
    switches = {"switch_" + flag.replace("-", "_"): flag for flag in SWITCHES if "switches" in fields}
    parameters = [
        *(_parameter(field, hints[field.name]) for field in fields.values() if DECLARATION in field.metadata),
        *(_keyword(name, None, _switch_type(flag)) for name, flag in switches.items()),
        *(_parameter(field, hints[field.name]) for field in common),
    ]

    def decorate(function: Callable[[Options], messages.Output | int]) -> Callable[..., Command]:
        def command(context: typer.Context, **values: Any) -> Command:
            if switches:
                given = {flag: values.pop(name) for name, flag in switches.items()}
                values["switches"] = {flag: value for flag, value in given.items() if value is not None}
                values["vllm_args"] = ServeArguments(*(context.obj or ()))
            return functools.partial(_run, function, kind(**values))

        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        command.__signature__ = inspect.Signature([context, *parameters])  # pyrefly: ignore[missing-attribute]
        command.__annotations__ = {each.name: each.annotation for each in (context, *parameters)}
        command.__doc__, command.__name__ = function.__doc__, function.__name__
        return command

    return decorate


def _run(function: Callable[[Options], messages.Output | int], options: Options) -> int:
    """Run a command, write what it found, and return its exit code."""
    with messages.held_messages(verbose=options.verbose):
        if isinstance(options, PlanOptions) and options.show_config:
            from moe_optimizer.cli.show_config import shown_config

            output = shown_config(options)
        else:
            output = function(options)
    if isinstance(output, int):
        return output
    messages.write_output(output, as_json=options.json)
    return output.code


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return _keyword(field.name, default, Annotated[hint, field.metadata[DECLARATION]])


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _switch_type(flag: str) -> Any:
    return Annotated[bool | None, typer.Option(f"--enable-{flag}/--disable-{flag}", help=SWITCHES[flag])]
