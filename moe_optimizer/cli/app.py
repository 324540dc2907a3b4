"""Assembles the commands into one Typer application, runs a command line and reports its errors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, cast

import typer

from moe_optimizer import __version__
from moe_optimizer.cli import (
    bench,
    build,
    compare,
    debug,
    doctor,
    experts,
    inspect,
    measure,
    messages,
    plan,
    quality,
    report,
    serve,
    top,
    tune,
)
from moe_optimizer.cli.arguments import check_consistency, split_at_separator, with_our_switches
from moe_optimizer.errors import ExitCode, InputError, MoeOptimizerError
from moe_optimizer.near_match import did_you_mean

# The base class of every mistake on the command line. Typer publishes only this subclass of it.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])

_SYNONYMS = "Synonyms such as --enable-cuda-graphs are taken too: docs/names.md"
_EXTRA_HINT = "arguments of vllm serve go after --"

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


def _print_version(wanted: bool) -> None:
    if wanted:
        messages.write_data(f"moe-optimizer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the command."""


app.command("serve", epilog=_SYNONYMS)(serve.command)
app.command("inspect")(inspect.command)
app.command("plan", epilog=_SYNONYMS)(plan.command)
app.command("bench", epilog=_SYNONYMS)(bench.command)
app.command("compare")(compare.command)
app.command("report")(report.command)
app.command("quality", epilog=_SYNONYMS)(quality.command)
app.command("tune", epilog=_SYNONYMS)(tune.command)
app.add_typer(measure.app, name="measure")
app.add_typer(debug.app, name="debug")
app.command("doctor")(doctor.command)
app.command("experts")(experts.command)
app.command("top")(top.command)
app.command("build")(build.command)


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
def _parser() -> Any:
    """Return the parser of all commands. Making it takes 30 ms: a process that runs many commands does so once."""
    return typer.main.get_command(app)


def _run(arguments: list[str], *, program: str, command: str | None) -> int:
    own, vllm_args = split_at_separator(arguments)
    root = _parser()
    name, target = _named_command(root, own if command is None else [command])
    if vllm_args is not None and name not in serve.TAKES_VLLM_ARGS:
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
    option, extra_hint = getattr(error, "option_name", None), _EXTRA_HINT if name in serve.TAKES_VLLM_ARGS else None
    if option is not None and str(error.message).startswith("No such option"):
        return InputError(f"unknown option {option}", hint=did_you_mean(option, _option_names(target)) or extra_hint)
    message = " ".join(error.format_message().split())
    if message.startswith("Got unexpected extra argument"):
        return InputError(message, hint=extra_hint)
    parameter = getattr(error, "param", None)
    if parameter is not None and parameter.opts:
        message = f"{parameter.opts[0]}: {error.message}"
    return InputError(message, hint=getattr(error, "hint", None))


def _option_names(command: Any) -> Iterable[str]:
    for parameter in command.params:
        yield from (name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--"))
    yield "--help"
