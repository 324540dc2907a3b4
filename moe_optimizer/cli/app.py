"""Assembles the commands into one Typer application, runs a command line and reports its errors.

A command line that names its command imports and parses that one alone: all of them take 0.1 s.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, cast

import typer

from moe_optimizer import __version__
from moe_optimizer.cli import messages
from moe_optimizer.cli.arguments import check_consistency, split_at_separator, with_our_switches
from moe_optimizer.errors import ExitCode, InputError, MoeOptimizerError
from moe_optimizer.near_match import did_you_mean

# The base class of every mistake on the command line. Typer publishes only this subclass of it.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])

COMMANDS = (
    "serve", "inspect", "plan", "bench", "compare", "report", "quality", "tune", "measure", "debug", "doctor",
    "experts", "top", "build",
)  # fmt: skip
"""Each is a module of this package. In the order of the help."""
TAKES_VLLM_ARGS = ("serve", "plan", "bench", "quality", "tune", "measure step")
"""Commands that take arguments of `vllm serve` after `--`."""
_SYNONYMS = "Synonyms such as --enable-cuda-graphs are taken too: docs/names.md"
_EXTRA_HINT = "arguments of vllm serve go after --"


def _print_version(wanted: bool) -> None:
    if wanted:
        messages.write_data(f"moe-optimizer {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the command."""


def make_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Return the application with these commands."""
    app = typer.Typer(
        name="moe-optimizer",
        help="Plan, apply and prove Mixture-of-Experts optimizations on stock vLLM.",
        epilog="Exit codes: 0 ok, 1 our bug, 2 bad input, 3 does not fit or unsupported, "
        "4 goal missed, 5 quality not kept, 6 a required optimization did not run, 7 the server died, 130 interrupted.",
        # Rich help costs 60 ms of imports, and it must be off for help text to be the same in a pipe and a terminal.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=True,
    )
    app.callback()(_root)
    for name in names:
        module = importlib.import_module(f"moe_optimizer.cli.{name}")
        if hasattr(module, "app"):  # commands of its own
            app.add_typer(module.app, name=name)
        else:
            app.command(name, epilog=_SYNONYMS if name in TAKES_VLLM_ARGS else None)(module.command)
    return app


def run(arguments: Sequence[str], *, program: str, command: str | None) -> int:
    """Run one command line and return its exit code; an expected error is written to stderr.

    Raises:
        KeyboardInterrupt, OSError, Exception: an interrupt, a failure of the system, or our bug.
    """
    messages.make_streams_safe()
    try:
        return _run(list(arguments), program=program, command=command)
    except MoeOptimizerError as error:
        messages.write_error(error)
        return error.exit_code


@functools.cache
def _parser(name: str) -> Any:
    """Return the parser of one command, or of all if it is none; kept for a process that runs many command lines."""
    return typer.main.get_command(make_app((name,) if name in COMMANDS else COMMANDS))


def _run(arguments: list[str], *, program: str, command: str | None) -> int:
    own, vllm_args = split_at_separator(arguments)
    words = own if command is None else [command]
    root = _parser(words[0] if words else "")
    name, target = _named_command(root, words)
    if vllm_args is not None and name not in TAKES_VLLM_ARGS:
        raise InputError(f"--: {name or program} takes no arguments for vllm serve")
    if any(option.startswith("--enable-") for option in _option_names(target)):
        own = with_our_switches(own)
    check_consistency(own)
    if own == name.split() and hasattr(target, "commands"):
        own = [*own, "--help"]
    runnable = root if command is None else target
    try:
        parsed = runnable.main(args=own, prog_name=program, standalone_mode=False, obj=vllm_args)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _UsageError as error:
        raise _input_error(error, target, name) from None
    if isinstance(parsed, functools.partial):
        return parsed()
    # An exit code: --help or --version has answered, or the parser itself was interrupted.
    return int(parsed or ExitCode.OK)


def _named_command(root: Any, words: Sequence[str]) -> tuple[str, Any]:
    """Return the name of the command in the first words ("measure speeds") and its parser; "" and `root` if none.

    Raises:
        InputError: there is no such command.
    """
    names: list[str] = []
    target = root
    for word in words:
        if word.startswith("-") or not hasattr(target, "commands"):
            break
        if word not in target.commands:
            raise InputError(
                f"unknown command {' '.join([*names, word])!r}, expected one of {', '.join(target.commands)}",
                hint=did_you_mean(word, target.commands),
            )
        names.append(word)
        target = target.commands[word]
    return " ".join(names), target


def _input_error(error: Any, target: Any, name: str) -> InputError:
    """Convert an error of the parser: one line, with the nearest option as hint."""
    option, extra_hint = getattr(error, "option_name", None), _EXTRA_HINT if name in TAKES_VLLM_ARGS else None
    if option is not None and str(error.message).startswith("No such option"):
        hint = _commands_with(option) or did_you_mean(option, _option_names(target)) or extra_hint
        return InputError(f"unknown option {option}", hint=hint)
    message = " ".join(error.format_message().split())
    if message.startswith("Got unexpected extra argument"):
        return InputError(message, hint=extra_hint)
    parameter = getattr(error, "param", None)
    if parameter is not None and parameter.opts:
        message = f"{parameter.opts[0]}: {error.message}"
    return InputError(message, hint=getattr(error, "hint", None))


def _commands_with(option: str) -> str | None:
    """Return which commands have an option that the one of the command line has not."""
    names = sorted(name for name, each in _parser("").commands.items() if option in _option_names(each))
    return f"an option of moe-optimizer {', '.join(names)}" if names else None


def _option_names(command: Any) -> Iterable[str]:
    for parameter in command.params:
        yield from (name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--"))
    yield "--help"
